"""`python -m driveprune` is the command `driveprune`."""

from driveprune.cli import main

main()
