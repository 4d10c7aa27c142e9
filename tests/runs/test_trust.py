"""A foreign store is data until somebody trusts it: no command imports what a spec names."""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from driveprune import datasets
from driveprune.cli import app
from driveprune.files import read_json, write_json
from driveprune.runs.job import carry_out
from driveprune.runs.spec import Spec, code_of, located
from driveprune.runs.sweep import sweep
from driveprune.runs.trust import check_trusted, foreign
from tests.runs.kills import small_spec

DIGITS = datasets.load("digits")
MODULE = """
from pathlib import Path
Path({mark!r}).write_text("the code of a foreign store has run")
from driveprune.methods.snip import score
from driveprune.models import digits_net
def net(*, classes, width=1.0, inputs=1, size=8):
    return digits_net(classes=classes, width=width, inputs=inputs, size=size)
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder of a run that is done."""
    root = tmp_path_factory.mktemp("done")
    carry_out(root, small_spec("snip"), DIGITS)
    return root / small_spec("snip").id


class Foreign:
    """A folder with somebody else's store and modules that tell when they are imported."""

    def __init__(self, root: Path, done: Path) -> None:
        self.root, self.store, self.done, self.mark = root, root / "store", done, root / "ran"
        (root / "evil_package").mkdir()
        for name in ("evil_plain.py", "evil_package/__init__.py", "evil_package/inner.py"):
            (root / name).write_text(MODULE.format(mark=str(self.mark)))

    def spec(self, *, model=None, method=None, data=None, model_code="", method_code="") -> Path:
        """A run of the store whose spec names something; all its files are there."""
        content = small_spec("snip").to_json()
        content["recipe"]["model"] = model or content["recipe"]["model"]
        content["recipe"]["data"] = data or content["recipe"]["data"]
        content |= {"model_code": model_code, "method_code": method_code}
        content |= {"method": method, "knobs": {}} if method else {}
        folder = self.store / Spec.from_json(content).id
        shutil.copytree(self.done, folder, dirs_exist_ok=True)
        write_json(folder / "spec.json", content)
        (self.store / "sweeps").mkdir(exist_ok=True)
        write_json(self.store / "sweeps" / "x.json", {folder.name: {"spec": content, "steps": 9}})
        return folder / "spec.json"

    def ran(self) -> bool:
        return self.mark.exists()


@pytest.fixture
def foreign_store(tmp_path, done, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield Foreign(tmp_path, done)
    for name in [name for name in sys.modules if name.startswith("evil_")]:
        del sys.modules[name]


def command(*words):
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "120"})


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


NAMES = [
    {"model": "evil_plain.net"},
    {"model": "evil_package.inner.net"},
    {"model": "evil_package.net", "model_code": "0" * 64},
    {"method": "evil_plain"},
    {"method": "evil_package.inner"},
    {"method": "evil_plain.score", "method_code": "0" * 64},
]


@pytest.mark.parametrize("names", NAMES, ids=lambda names: "-".join(names.values())[:40])
def test_no_command_imports_what_a_foreign_spec_names(foreign_store, names):
    spec = foreign_store.spec(**names)
    refused = command("run", "--spec", spec, "--runs", "again")
    assert refused.exit_code == 2, refused.output
    assert "--trust" in refused.stderr or "it has changed" in refused.stderr
    assert not (foreign_store.root / "again").exists()
    assert not foreign_store.ran()
    assert str(foreign_store.root) not in sys.path


def test_looking_at_a_foreign_store_imports_nothing(foreign_store):
    for names in NAMES:
        spec = foreign_store.spec(**names)
        shown = (("show", spec.parent), ("show", spec.parent, "--json"), ("compare", spec.parent, spec.parent))
        assert [command(*words).exit_code for words in shown] == [0, 0, 0]
    for words in (
        ("report", "store"), ("report", "store", "--json"), ("report", "store", "-o", "r.html"), ("watch", "store"),
        ("bench", spec.parent, "--batches", "1", "--rounds", "1", "--threads", "1"),
    ):  # fmt: skip
        told = command(*words)
        assert told.exit_code == 0, (words, told.output)
    assert not foreign_store.ran()


def test_with_a_matching_checksum_or_trust_it_runs(foreign_store):
    code = checksum(foreign_store.root / "evil_plain.py")
    spec = foreign_store.spec(model="evil_plain.net", method="evil_plain", model_code=code, method_code=code)
    told = command("run", "--spec", spec, "--runs", "again", "--json")
    assert told.exit_code == 0, told.output
    assert foreign_store.ran()
    assert f"loading: the spec's model evil_plain.net: {foreign_store.root / 'evil_plain.py'}" in told.stderr
    assert json.loads(told.stdout)["id"] == spec.parent.name
    foreign_store.mark.unlink()
    del sys.modules["evil_plain"]
    spec = foreign_store.spec(model="evil_plain.net")
    assert command("run", "--spec", spec, "--runs", "again").exit_code == 2
    assert not foreign_store.ran()
    told = command("run", "--spec", spec, "--runs", "again", "--trust")
    assert told.exit_code == 0, told.output
    assert foreign_store.ran()


def test_ones_own_run_is_repeated_by_its_checksum(foreign_store):
    """Made by naming the code, repeated by its spec, refused once the code is another."""
    words = ("--epochs", "2", "--width", "0.25", "--images", "200", "--test-images", "50", "--sparsity", "0.9")
    made = command("run", "--model", "evil_plain.net", "--method", "evil_plain", *words, "--runs", "mine", "--json")
    assert made.exit_code == 0, made.output
    spec = Path(json.loads(made.stdout)["folder"]) / "spec.json"
    again = command("run", "--spec", spec, "--runs", "repeated", "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["rows"] == json.loads(made.stdout)["rows"]
    with (foreign_store.root / "evil_plain.py").open("a") as file:
        file.write("# another\n")
    told = command("run", "--spec", spec, "--runs", "third", "--trust")
    assert "it has changed" in told.stderr  # another network would stand under the name of this one


def test_the_standard_library_is_known_to_everybody_and_so_is_its_checksum(foreign_store):
    name = "antigravity.geohash"
    spec = foreign_store.spec(model=name, model_code=code_of(name))
    assert "--trust" in command("run", "--spec", spec).stderr
    assert "antigravity" not in sys.modules


def test_resuming_a_foreign_run_and_doing_it_in_a_sweep_import_nothing(foreign_store):
    spec = foreign_store.spec(model="evil_plain.net")
    for name in ("result.json", "net.safetensors"):
        (spec.parent / name).unlink()
    wanted = Spec.from_json(read_json(spec))
    with pytest.raises(ValueError, match=r"'evil_plain.net', which is not of this package.*trust=True"):
        carry_out(foreign_store.store, wanted, DIGITS)
    with pytest.raises(ValueError, match="trust=True"):
        sweep(foreign_store.store, [wanted], DIGITS)
    assert not foreign_store.ran()
    assert not (spec.parent / "error.txt").exists()


def test_a_folder_of_images_is_read_only_if_it_was_read_before_or_is_trusted(foreign_store):
    for name in ("a", "b"):
        (foreign_store.root / "images" / name).mkdir(parents=True)
        for number in range(5):
            Image.new("L", (8, 8), 40 * number).save(foreign_store.root / "images" / name / f"{number}.png")
    spec = foreign_store.spec(data="images")
    refused = command("run", "--spec", spec)
    assert refused.exit_code == 2
    assert "reads the folder images" in refused.stderr
    assert not list((foreign_store.root / "images").glob(".driveprune*"))
    wanted = Spec.from_json({**read_json(spec), "fingerprint": datasets.load("images").fingerprint})
    check_trusted(wanted)  # what was read here before is known by its checksum
    with pytest.raises(ValueError, match="reads the folder images"):
        check_trusted(Spec.from_json(read_json(spec)))
    check_trusted(Spec.from_json(read_json(spec)), trusted=True)


def test_the_file_of_a_name_is_found_without_importing_the_packages_around_it(foreign_store):
    sys.path.insert(0, str(foreign_store.root))
    assert located("evil_package.inner.net") == foreign_store.root / "evil_package" / "inner.py"
    assert located("evil_package.net") == foreign_store.root / "evil_package" / "__init__.py"
    assert located("evil_plain") == foreign_store.root / "evil_plain.py"
    assert located("evil_absent.net") is None
    assert located("__main__.net") is None or located("__main__.net").is_file()
    assert not foreign_store.ran()
    assert [name for name in sys.modules if name.startswith("evil_")] == []


def test_what_a_spec_names_is_told_by_kind(foreign_store):
    found = foreign(Spec.from_json(read_json(foreign_store.spec(model="evil_plain.net", method="evil_plain"))))
    assert [(each.what, each.known) for each in found] == [("model", False), ("method", False)]
    assert foreign(small_spec("dense")) == foreign(small_spec("drive")) == []


def test_a_module_that_lies_in_the_current_folder_does_not_stand_for_an_installed_one(foreign_store):
    """Who stands in a foreign folder runs nothing of it: neither here nor in the processes of a sweep."""
    for name in ("onnxscript", "sklearn", "numba"):
        (foreign_store.root / f"{name}.py").write_text(MODULE.format(mark=str(foreign_store.mark)))
    spec = foreign_store.spec()
    assert command("bench", spec.parent, "--batches", "x").exit_code == 2
    assert command("export", spec.parent, "--format", "x").exit_code == 2
    assert str(foreign_store.root) not in sys.path
    words = ("--epochs", "1", "--width", "0.25", "--images", "100", "--test-images", "50", "--sparsities", "0.9")
    told = command("sweep", "--methods", "snip", *words, "--runs", "swept")
    assert told.exit_code == 0, told.output
    assert not foreign_store.ran()
