"""Files, names and commands of other systems."""
