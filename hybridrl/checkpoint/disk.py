"""Bytes and names on a disk: what is published appears at once and whole. Knows nothing of steps or models."""

import ctypes
import errno
import os
from ctypes import c_long
from pathlib import Path
from typing import BinaryIO

_LIBC = ctypes.CDLL(None, use_errno=True)
_SYNC_FILE_RANGE_WRITE = 2


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


def reserve(file: BinaryIO, size: int) -> None:
    """Take room for so many bytes of a file, which then reads as zeros. Raises OSError where the disk has none."""
    # Not os.posix_fallocate: where a file system cannot do it, that writes a byte to every block, one by one.
    if _LIBC.fallocate(file.fileno(), 0, c_long(0), c_long(size)):
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(number, os.strerror(number), file.name)
        file.truncate(size)


def start_writing(file: BinaryIO, begin: int, size: int) -> None:
    """Have some written bytes of a file go to the disk from now on, without waiting; `reach_disk` waits."""
    _LIBC.sync_file_range(file.fileno(), c_long(begin), c_long(size), _SYNC_FILE_RANGE_WRITE)
