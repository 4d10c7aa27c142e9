"""driveprune in other programs: one file = one program."""
