# `make demo` and `make test` each set up everything they need, once, in .venv.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test test-all steady docs bench lint format clean

help:
	@echo "make demo      prune a network on handwritten digits with every kind of method, and compare"
	@echo "make test      linters, types and tests"
	@echo "make test-all  the same, with the long campaigns"
	@echo "make steady    the tests with several processes 50 times beside a busy core, less the rounds already done"
	@echo "make docs      the site, in docs/_build/html"
	@echo "make bench     the benchmarks; figures go to results/"

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[all]"
	@touch $@

demo: $(READY)
	@$(BIN)/driveprune sweep --threads 1 --jobs 2 --runs runs/demo
	@$(BIN)/driveprune report runs/demo -o runs/demo/report.html --figures runs/demo/figures

test: $(READY) lint
	$(BIN)/python -m pytest -q -n 2

test-all: $(READY) lint
	$(BIN)/python -m pytest -q -n 2 -m ""
	$(BIN)/python benchmarks/steady.py

steady: $(READY)
	$(BIN)/python benchmarks/steady.py

docs: $(READY)
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/core.py
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/pruning_time.py
	$(BIN)/python benchmarks/report.py
	$(BIN)/python benchmarks/distributed.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	$(BIN)/python benchmarks/sparse.py $(DATA_DIR)

clean:
	rm -rf .venv build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
