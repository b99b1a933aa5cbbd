"""Putting a run together: what each entry point prepares, starts and restores."""
