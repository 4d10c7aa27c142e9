"""Early pruning in frameworks of others: one file each, imported by its full name."""
