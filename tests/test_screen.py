"""Nothing that others have named makes a terminal do something, or reads as something else: in no command."""

import ast
import contextlib
import io
import json
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from typer.testing import CliRunner

import driveprune as dp
from driveprune.cli import app
from driveprune.cli.app import print_error
from driveprune.files import write_json
from driveprune.progress import shown
from driveprune.report import figures, tables
from driveprune.report.groups import groups
from driveprune.report.live import watch
from driveprune.report.page import page
from driveprune.runs.store import read_runs
from driveprune.screen import Screen, as_markup, printable, printable_json
from driveprune.train import Moment
from tests.report import stores

ODD = "\x00\x1b\x07\x08\x7f\x85\x9b\x9d\u202a\u202e\u2066\u2069\u200e\u200f\u061c\u200b\ufeff\u2028\u2029\u3164\ufe0f"
EVIL = f"<b>[red]a\x1b]0;title\x07\x1b[2J\x1b[31m\r\n{ODD}\ud800b"
IN_A_NAME = f"a\x1b]0;t\x07\x1b[2J\r\n{ODD[1:]}\udcff b"


def odd_letters(text: str) -> set[str]:
    """By the categories of Unicode, not by the function that is tested."""
    unseen = {letter for letter in text if unicodedata.category(letter) in {"Cc", "Cf", "Cs", "Zl", "Zp"}} - {"\n"}
    return unseen | (set(text) & set(ODD))


def run(*words):
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "150"})
    return done.exit_code, done.stdout_bytes.decode("utf-8", "surrogatepass"), done.stderr


def test_what_is_odd_is_shown_and_what_is_not_is_left():
    for letter in ODD + "\ud800\udfff":
        assert printable(f"a{letter}b") != f"a{letter}b"
        assert not odd_letters(printable(letter))
        assert json.loads(printable_json(json.dumps(letter, ensure_ascii=False))) == letter
    assert printable("\x1b \x85 \u202e \ufeff") == r"\x1b \x85 \u202e \ufeff"
    plain = "größe × 98% ▁▂ 数据 \N{BRAILLE PATTERN DOTS-12} [x] \\x1b <b> a b"
    assert printable(plain) == plain
    assert printable("a\n\tb", lines=True) == "a\n\tb"
    for number in (*range(0x3000), 0xD800, 0xDFFF, 0xFEFF, 0xE0001, 0xE0020):
        assert not odd_letters(printable(chr(number))), hex(number)


def test_a_screen_shows_no_odd_letter_wherever_it_stands():
    for terminal in (False, True):
        said = io.StringIO()
        screen = Screen(file=said, force_terminal=terminal, width=200, color_system="truecolor" if terminal else None)
        table = Table(EVIL, title=EVIL)
        table.add_row(EVIL)
        screen.print(table, EVIL, as_markup(EVIL))
        screen.print(EVIL, markup=False, soft_wrap=True)
        text = said.getvalue()
        assert "\x1b[2J" not in text
        assert "\x1b]" not in text
        assert "\\x1b]0;title" in text
        own = Console(file=io.StringIO(), force_terminal=True, width=200, color_system="truecolor")
        own.print("[bold]x")
        assert odd_letters(text) <= ({"\x1b"} if terminal else set())
        assert "\x1b[" in own.file.getvalue()  # what a terminal's own colours are


def test_bars_and_lines_of_progress():
    for terminal in (False, True):
        said = io.StringIO()
        screen = Screen(file=said, force_terminal=terminal, width=100)
        with shown(EVIL, console=screen) as update:
            update(Moment(1, 2, f"pruning{EVIL}", [{"cycle": 0, "epoch": 1, "loss": 1.0, "sparsity": 0.5}]))
        with Progress(console=screen) as bars:
            bars.add_task(as_markup(EVIL), total=3)
        text = said.getvalue()
        assert "\x1b]0" not in text
        assert "\x9b" not in text
        assert "\u202e" not in text


class Named(nn.Module):
    """Layers with the names that a file of others may have."""

    def __init__(self, odd: str) -> None:
        super().__init__()
        self._modules[odd] = nn.Linear(6, 4)

    def forward(self, x):
        return next(iter(self._modules.values()))(x)


@pytest.fixture
def nets(tmp_path):
    """Two files of networks with odd names and an odd origin, in a folder with an odd name."""
    folder = tmp_path / IN_A_NAME
    folder.mkdir()
    for name, odd in (("one", EVIL.replace("\ud800", "")), ("two", "other\x1b[2J")):
        net = Named(odd)
        mask = dp.Mask({f"{odd}.weight": torch.rand(4, 6) < 0.5})
        dp.apply(net, mask)
        about = {EVIL: EVIL, "network": {"name": EVIL}, "list": [EVIL], "effective_sparsity": EVIL}
        dp.save(folder / f"{name}.safetensors", net, mask, provenance=about)
    return folder


@pytest.fixture
def store(tmp_path):
    """A store in which every text is odd."""
    root = tmp_path / f"store {IN_A_NAME}"
    names = replace(stores.SMALL, data=EVIL, model=EVIL)
    runs = [stores.run("snip", 0.9, 0.9), stores.run("drive", 0.9, 0.8), stores.unfinished("imp", 0.9, "failed")]
    for number, each in enumerate(runs):
        spec = {
            **each.spec,
            "recipe": names.to_json(),
            "knobs": {EVIL: EVIL},
            "method": f"{each.spec['method']}{EVIL}",
        }
        folder = root / f"{number} {IN_A_NAME}"
        folder.mkdir(parents=True)
        write_json(folder / "spec.json", spec)
        (folder / "status.json").write_text(
            json.dumps({"step": 1, "steps": 2, "work": EVIL, "values": [], "time": 0})
        )
        if each.result is None:
            (folder / "error.txt").write_text(EVIL.replace("\ud800", ""), newline="")
            continue
        layers = [{**layer, "name": EVIL} for layer in each.result["layers"]]
        odd = {"data": EVIL, "best_by": EVIL, "engine": EVIL, "speedup": 2.0, "layers": layers}
        odd["environment"] = {"versions": {EVIL: EVIL}, "machine": {EVIL: EVIL}, "date": EVIL}
        write_json(folder / "result.json", {**each.result, **odd})
    damaged = root / f"3 {IN_A_NAME}"
    damaged.mkdir()
    (damaged / "spec.json").write_text(json.dumps({EVIL: EVIL}))
    return root


@pytest.fixture
def images(tmp_path):
    """A folder of class folders with odd names, and one that cannot be read."""
    for folder, damaged in (("good", False), ("bad", True)):
        for name in ("x", IN_A_NAME):
            for number in range(5):
                path = tmp_path / f"{folder} {IN_A_NAME}" / name / f"{IN_A_NAME}{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (8, 8)).save(path)
                if damaged:
                    path.write_bytes(b"no image")
    return tmp_path


def test_every_command_shows_names_of_others_as_text(nets, store, images, tmp_path):
    one, two = (nets / f"{name}.safetensors" for name in ("one", "two"))
    runs = [path for path in sorted(store.iterdir()) if path.is_dir()]
    good, bad = (next(images.glob(f"{name} *")) for name in ("good", "bad"))
    commands = [
        ("show", one), ("show", one, "--json"), ("show", nets / IN_A_NAME), ("show", nets),
        *(("show", each) for each in runs), *(("show", each, "--json") for each in runs),
        ("compare", one, one), ("compare", one, two), ("compare", one, one, "--json"),
        ("report", store), ("report", store, "--json"), ("report", store, "-o", tmp_path / f"{IN_A_NAME}.html"),
        ("report", tmp_path / f"no {IN_A_NAME}"), ("report", store, "-o", tmp_path / f"{IN_A_NAME}.txt"),
        ("watch", store), ("export", one), ("bench", one), ("export", one, "--model", IN_A_NAME),
        ("export", one, "--format", IN_A_NAME), ("bench", one, "-o", tmp_path / f"x.{IN_A_NAME}"),
        ("data", "check", good), ("data", "check", good, "--json"), ("data", "check", bad),
        ("data", "check", IN_A_NAME), ("data", "get", IN_A_NAME), ("recipes", "show", IN_A_NAME),
        ("run", "--spec", runs[0] / "spec.json"), ("run", "--spec", tmp_path / IN_A_NAME),
        ("run", "--data", IN_A_NAME), ("run", "--method", IN_A_NAME), ("run", "--model", IN_A_NAME),
        ("run", "--recipe", IN_A_NAME), ("run", "--knob", IN_A_NAME), ("run", "--set", IN_A_NAME),
        ("sweep", "--methods", IN_A_NAME), ("sweep", "--seeds", IN_A_NAME), ("prune", IN_A_NAME, "digits"),
        ("preview", "digits_net", IN_A_NAME), (IN_A_NAME,), ("show", f"--{IN_A_NAME}"), ("data", IN_A_NAME),
        ("run", "--seed", IN_A_NAME), ("methods",), ("recipes",), ("data", "list"),
    ]  # fmt: skip
    escaped = 0
    for words in commands:
        code, said, errors = run(*words)
        assert code in {0, 1, 2}, (words, said, errors)
        assert not odd_letters(said), words
        assert not odd_letters(errors), words
        assert "Traceback" not in errors
        escaped += "x1b" in said + errors or "u001b" in said + errors
    assert escaped >= len(commands) - 7  # the others say nothing of the odd names
    for written in tmp_path.glob("*.txt"):
        assert not odd_letters(written.read_text())


def test_json_of_the_commands_holds_the_names_themselves(nets):
    _, said, _ = run("show", nets / "one.safetensors", "--json")
    assert json.loads(said)["provenance"][EVIL] == EVIL
    assert json.loads(said)["layers"][0]["name"] == f"{EVIL}.weight".replace("\ud800", "")


def test_a_terminal_that_is_watched_obeys_no_name(store):
    said = io.StringIO()
    screen = Screen(file=said, force_terminal=True, width=150, height=60)

    def enough(_):
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        watch([store, store], screen, wait=enough)
    for odd in ("\x1b]0", "\x9b", "\u202e", "\u2066", "\x07"):
        assert odd not in said.getvalue()


def test_pages_tables_and_pictures_show_them_as_text(store, tmp_path):
    made = groups(read_runs([store]))
    text = page(made, title=EVIL)
    assert "\\x1b]0;title" in text
    for letter in odd_letters(text):
        assert text.count(letter) == page([]).count(letter)  # in the scripts of the page, which are its own
    written = figures.write_all(tmp_path / "figures", made, [])
    assert {path.suffix for path in written} == {".svg", ".png", ".csv", ".tex"}
    for path in written:
        if path.suffix != ".png":
            assert not odd_letters(path.read_text()), path


def test_a_spreadsheet_computes_no_name():
    text = tables.to_csv(("=head",), [["=1+1"], ["@x"], ["+2 y"], ["-0.5"], [-0.5], ["-"], ["a\r\nb"], ["\u202e"]])
    assert text.splitlines() == ["'=head", "'=1+1", "'@x", "'+2 y", "-0.5", "-0.5", "-", r"a\r\nb", r"\u202e"]


def test_warnings_and_errors_are_one_line(capsys):
    print_error(ValueError(EVIL))
    print_error(KeyError(EVIL))
    said = capsys.readouterr().err
    assert said.count("\n") == 2
    assert not odd_letters(said)


def test_no_command_has_a_console_of_its_own():
    home = Path(dp.__file__).parent
    for path in sorted(home.rglob("*.py")):
        if path.name == "screen.py":
            continue
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = {node.id for node in calls if isinstance(node, ast.Name)}
        assert "Console" not in names, f"{path.name}: screen.Screen shows names of others safely"
        assert "print" not in names or path.name == "app.py", f"{path.name} prints without a Screen"
