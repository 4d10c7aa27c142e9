"""The command `driveprune`: one short function a command, in the order of its help."""

from driveprune.cli import runs, reports, cuts, delivery, looking, data  # noqa: F401, I001
from driveprune.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command."""
    app()
