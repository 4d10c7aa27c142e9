"""The command `driveprune`: one short function a command, in the order of its help."""

import os  # noqa: I001  # commands in the order of the help
import sys

from driveprune.cli import runs, reports, cuts, delivery, looking, data  # noqa: F401
from driveprune.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command."""
    if sys.argv[1:2] == ["bench"] and os.name == "posix" and "OMP_WAIT_POLICY" not in os.environ:
        # Threads that wait must sleep: those of torch, spinning, would take a core from the kernels that are measured
        # next. OpenMP reads this only once, when it is loaded.
        words = [sys.executable, "-m", "driveprune", *sys.argv[1:]]
        # Begun as a script, the current folder is no place for modules, and `-m` would make it one.
        safe = {} if sys.path[0] in {"", os.getcwd()} else {"PYTHONSAFEPATH": "1"}
        os.execve(sys.executable, words, {**os.environ, **safe, "OMP_WAIT_POLICY": "passive"})
    app()
