"""`python -m hybridrl.doctor clean [DIR ...]`: lists what dead runs have left on this machine; --yes removes it.

A run cleans up after itself however it ends, and the next one after it; this is for machines where neither could. What
a living process uses is never listed: a private directory is locked by its owner, a run's directory by its run. Shared
memory is mapped by its users, but those in another container are not visible here, so it is listed on request only.
"""

import argparse
import contextlib
import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil

from hybridrl.checkpoint.store import Store, holder
from hybridrl.runtime import keeper
from hybridrl.tracking.console import print_text

SHARED = Path("/dev/shm")
# Of torch, whose names have the process that made them, and of Python's multiprocessing, which vLLM uses.
SEGMENT = re.compile(r"torch_(?P<process>\d+)_.+|psm_[0-9a-f]+")
HIDDEN = re.compile(r"\.global_step_\d+\.(writing|deleting|replaced)")


def leftovers(directories: list[Path], *, shared_memory: bool, remove: bool) -> Iterator[str]:
    """Yield a line for each thing that is left, and remove it if `remove` is set."""
    for private in keeper.abandoned():
        pids = keeper.working_in(private)
        names = ", ".join(f"{pid} {_name(pid)}" for pid in pids)
        yield f"{private}{f', and its processes: {names}' if names else ''}"
        if remove:
            keeper.clear(private)
    for segment in _unused_segments() if shared_memory else ():
        yield f"{segment} ({segment.stat().st_size / 1e6:.1f} MB of shared memory)"
        if remove:
            segment.unlink(missing_ok=True)
    for directory in directories:
        hidden = [path for path in sorted(directory.iterdir()) if HIDDEN.fullmatch(path.name)]
        if hidden and not holder(directory):
            for path in hidden:
                size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                yield f"{path} ({size / 1e6:.1f} MB; published if it is complete)"
            if remove:
                with closing(Store(directory)):  # does so when it is opened
                    pass


def _name(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).name()
    return "(ended)"


def _unused_segments() -> list[Path]:
    """Return this user's shared memory that no process has mapped and whose maker, if it is named, has ended."""
    found = {}
    for path in SHARED.iterdir() if SHARED.is_dir() else ():
        match = SEGMENT.fullmatch(path.name)
        if match and path.stat().st_uid == os.getuid() and not psutil.pid_exists(int(match["process"] or -1)):
            found[path.name] = path
    for process in Path("/proc").glob("[0-9]*") if found else ():
        with contextlib.suppress(OSError):  # it has ended, or is another user's, who cannot map what is not theirs
            for name in re.findall(rf"{SHARED}/(\S+)", (process / "maps").read_text()):
                found.pop(name, None)
    return sorted(found.values())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.doctor clean",
        description="What dead runs have left on this machine: private directories with their processes; and in the "
        "runs' directories that are named, unfinished checkpoints.",
        epilog="exit status: 0 nothing is left (any more), 1 something is left, 2 the command cannot be parsed",
        allow_abbrev=False,
    )
    parser.add_argument("directories", nargs="*", type=Path, metavar="DIR", help="a run's trainer.default_local_dir")
    unmapped = "also shared memory that no process has mapped; not in a container that shares /dev/shm with another"
    parser.add_argument("--shared-memory", action="store_true", help=unmapped)
    parser.add_argument("--yes", action="store_true", help="remove what is listed")
    arguments = parser.parse_args(argv)
    if missing := [directory for directory in arguments.directories if not directory.is_dir()]:
        parser.error(f"there is no directory {missing[0]}")
    lines = []
    for line in leftovers(arguments.directories, shared_memory=arguments.shared_memory, remove=arguments.yes):
        print_text(f"{'removed' if arguments.yes else 'left'}: {line}")
        lines.append(line)
    if not lines:
        print("nothing is left of dead runs")
    elif not arguments.yes:
        print("to remove it: add --yes")
    return int(bool(lines) and not arguments.yes)
