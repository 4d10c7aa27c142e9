"""The architecture: data flow one way, every room has a clear name and a test."""

import ast
from pathlib import Path

import driveprune

HOME = Path(driveprune.__file__).parent
ORDER = [
    "gloo", "kinds", "collectives", "mask", "whole", "seeds", "screen", "container", "files", "compiled", "noise",
    "selection", "schedule", "gradients", "double", "signals", "twin", "graph", "ties", "plan", "methods", "cut",
    "hold", "pruner", "gaps", "netfile", "models", "summary", "preview", "frozen", "traced", "exported", "atoms",
    "channels", "zeros", "alike", "compact", "sparse", "engine", "export", "delivery", "bench", "batches", "archives",
    "datasets", "recipes", "finite", "train", "progress", "fit", "runs", "report", "integrations", "cli",
]  # fmt: skip


def room(path: Path) -> str:
    return path.relative_to(HOME).with_suffix("").parts[0]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("driveprune"):
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return found


def files() -> list[Path]:
    return [path for path in sorted(HOME.rglob("*.py")) if path.parent != HOME or path.stem[:2] != "__"]


def test_every_file_is_in_a_known_room():
    assert {room(path) for path in files()} == set(ORDER)


def test_rooms_import_only_rooms_above():
    for path in files():
        below = [name for name in imports(path) if ORDER.index(name) > ORDER.index(room(path))]
        assert not below, f"{path.name} imports {below}"


def test_every_room_has_a_test():
    tests = Path(__file__).parent
    for name in ORDER:
        assert (tests / f"test_{name}.py").exists() or (tests / name).is_dir(), name


def test_every_method_has_a_test():
    for name in driveprune.methods.names():
        assert (Path(__file__).parent / "methods" / f"test_{name}.py").exists(), name
