"""The site: it builds without a warning, loads nothing from elsewhere, its code runs, nothing public is left out."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import typer
from torch import nn

import driveprune as dp
from driveprune.cli import app
from tests.nets import batch, mlp

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
COMMANDS = typer.main.get_command(app).commands


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages as they were built, by their names."""
    target = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(target / "trees"), "-b", "html"]
    built = subprocess.run([*words, str(DOCS), str(target / "html")], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return {path: _read(path) for path in (target / "html").rglob("*.html")}


class _Page(HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self):
        super().__init__()
        self.links, self.loads, self.anchors = [], [], set()

    def handle_starttag(self, tag, attrs):
        known = dict(attrs)
        self.anchors.add(known.get("id"))
        if tag == "a" and "href" in known:
            self.links.append(known["href"])
        elif tag in {"script", "img", "link", "iframe", "source"}:
            self.loads.append(known.get("src") or known.get("href") or "")


def _read(path):
    page = _Page()
    page.feed(path.read_text())
    return page


def test_pages_load_nothing_from_elsewhere(site):
    assert [load for page in site.values() for load in page.loads if re.match(r"(https?:)?//", load)] == []


def test_links_lead_somewhere(site):
    for path, page in site.items():
        for link in page.links:
            if re.match(r"\w+:", link):
                continue
            file, _, anchor = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            assert target.exists(), f"{path.name}: {link}"
            if anchor and target in site:
                assert anchor in site[target].anchors, f"{path.name}: {link}"


def test_every_page_can_be_reached(site):
    index = next(page for path, page in site.items() if path.name == "index.html" and path.parent.name == "html")
    for page in PAGES:
        name = page.relative_to(DOCS).with_suffix(".html").as_posix()
        assert name == "index.html" or name in index.links, name


def test_all_that_is_public_is_in_the_api(site):
    api = next(page for path, page in site.items() if path.name == "api.html")
    modules = {"datasets", "methods", "models", "recipes"}
    for name in dp.__all__:
        wanted = f"module-driveprune.{name}" if name in modules else f"driveprune.{name}"
        assert wanted in api.anchors, name
    for name in dp.methods.names():
        assert f"driveprune.methods.{name}.plan" in api.anchors, name


def test_every_command_is_described():
    text = (DOCS / "commands.md").read_text()
    for name in COMMANDS:
        assert f"### `driveprune {name}`" in text, name


def test_every_recipe_and_method_is_named(site):
    text = "".join(path.read_text() for path in site if path.name in {"recipes.html", "choosing.html"})
    for name in (*dp.recipes.names(), *dp.methods.names()):
        assert name in text, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_as_the_command_takes_them(page):
    for line in "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines():
        words = re.sub(r"\s#.*", "", line).partition("driveprune ")[2].split()
        if not words or "pip" in line:
            continue
        command = COMMANDS[words[0]]
        command = getattr(command, "commands", {}).get(words[1], command) if len(words) > 1 else command
        known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        assert {word for word in words if word.startswith("-")} <= known, line


SLOW = {"ray"}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page.stem in SLOW else [])
        for page in PAGES
        if blocks(page, "python")
    ],
)
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning:lightning")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
@pytest.mark.filterwarnings("ignore::driveprune.CollapseWarning")
def test_the_code_runs(page, tmp_path, monkeypatch):
    for module in re.findall(r"driveprune\.integrations\.\w+", page.read_text()):
        pytest.importorskip(module, exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    model = mlp()
    names = {"model": model, "loader": [batch(seed=0), batch(seed=1)], "loss": nn.CrossEntropyLoss()}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.01)
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.slow
def test_the_code_for_several_processes_runs(tmp_path):
    text = (DOCS / "integrations" / "torchrun.md").read_text()
    code = re.search(r"^```{code-block} python\n:name: torchrun\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1]
    (tmp_path / "train.py").write_text(code)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": 230 weights are kept") == 2
