"""Bytes and names on a disk: what is published appears at once and whole. Knows nothing of steps or models."""

import os
from pathlib import Path


def publish(written: Path, final: Path, replaced: Path | None = None) -> None:
    """Make a finished file or directory appear under its name at once: it first reaches the disk, then one rename.
    What bears the name already is first renamed to `replaced`; a file needs no such name."""
    for path in (*written.rglob("*"), written):
        reach_disk(path)
    if replaced is not None and final.exists():
        final.replace(replaced)
    written.replace(final)
    reach_disk(final.parent)


def reach_disk(path: Path) -> None:
    """Wait until a file's bytes, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
