"""The saved steps of a run: each is whole or absent, as it is written aside and appears by one rename.

Knows directories and JSON; never what a step's files hold. A directory with a dot in front is no step: `.writing` is
not finished, `.replaced` gives way to a newer one of its number, `.deleting` is on its way out.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from hybridrl.checkpoint.disk import publish, reach_disk
from hybridrl.checkpoint.manifest import write_manifest
from hybridrl.checkpoint.saved import NEEDED, STATE, Saved, check, newest_good, saved_steps, staying, step_number
from hybridrl.config import ConfigError

__all__ = ["LATEST", "LOCK", "SKIPPED_UPDATES", "SaveFailed", "Saved", "Store", "check"]

LOCK = ".lock"  # held by the run that is at work in a directory
LATEST = "latest_checkpointed_iteration.txt"  # for people and other tools: here the directories are asked
SKIPPED_UPDATES = "skipped_updates"  # where training ranks write the rows of updates that were not finite

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system without locks cannot tell of a second run


class SaveFailed(RuntimeError):
    """A step could not be saved; those saved before are intact."""


class Store:
    """The saved steps of one run at a time: `<directory>/global_step_N`, and the file that names the newest.

    `keep`: how many of them stay (None: all). `keep_best`: a metric; the step with the greatest value stays too, with
    a leading "-" the one with the least. ConfigError: another run is at work in the directory.
    """

    def __init__(self, directory: Path, *, keep: int | None = None, keep_best: str | None = None) -> None:
        assert keep is None or keep > 0
        self.directory, self.keep, self.keep_best = directory, keep, keep_best
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(directory)
        self._tidy()

    def close(self) -> None:
        """Leave the directory to others, as the end of the process does."""
        self._lock.close()

    def begin(self, step: int) -> Path:
        """An empty directory to write a step into."""
        aside = self._aside(step, "writing")
        try:
            self._tidy(step)
            aside.mkdir()
        except OSError as error:
            raise self.failed(step, error) from error
        return aside

    def publish(self, step: int, state: dict[str, Any]) -> Saved:
        """Make a written step appear, with its state; then delete what need not stay. May run in a thread."""
        assert state.keys() >= NEEDED
        aside, final = self._aside(step, "writing"), self.directory / f"global_step_{step}"
        replaced, latest = self._aside(step, "replaced"), self.directory / f".{LATEST}.writing"
        try:
            older = [saved for saved in self.saved() if saved.step != step]
            state = state | {"published": 1 + max((saved.state["published"] for saved in older), default=0)}
            (aside / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
            write_manifest(aside)
            publish(aside, final, replaced)
            latest.write_text(str(step))
            publish(latest, self.directory / LATEST)
        except OSError as error:
            raise self.failed(step, error) from error
        published = Saved(step, final, state)
        stay = {saved.path for saved in staying([*older, published], self.keep, self.keep_best)}
        for path in (replaced, *(saved.path for saved in older if saved.path not in stay)):
            self._delete(path)
        return published

    def abandon(self, step: int) -> None:
        """Remove what was written of a step; those saved before stay as they are."""
        self._tidy(step)

    def failed(self, step: int, error: Exception) -> SaveFailed:
        """Abandon a step whose writing met an error, and say so: what is then to be raised."""
        free = ""
        with contextlib.suppress(OSError):  # on a disk that fails altogether the first error is the one to tell
            free = f", where {shutil.disk_usage(self.directory).free / 1e9:.1f} GB were free"
            self.abandon(step)
        return SaveFailed(
            f"step {step} could not be saved in {self.directory}{free}: {error}; the steps saved before are intact"
        )

    def saved(self) -> list[Saved]:
        """The published steps, oldest first; one whose state cannot be read is left out."""
        return saved_steps(self.directory)

    def last(self) -> Path | None:
        """The newest step that was healthy when it was saved."""
        return next((saved.path for saved in reversed(self.saved()) if saved.state["healthy"]), None)

    def newest_good(self, say: Callable[[str], None]) -> Saved | None:
        """The newest step that is whole and healthy; `say` is told of each that is passed over, and why."""
        return newest_good(self.directory, say)

    def _aside(self, step: int, kind: str) -> Path:
        return self.directory / f".global_step_{step}.{kind}"

    def _tidy(self, step: int | str = "*") -> None:
        """Take back a step whose successor never came, and remove what is half written or half deleted."""
        for replaced in self.directory.glob(f".global_step_{step}.replaced"):
            final = self.directory / f"global_step_{step_number(replaced)}"
            if final.exists():
                self._delete(replaced)
            else:
                replaced.replace(final)
        for kind in ("writing", "deleting"):
            for left in self.directory.glob(f".global_step_{step}.{kind}"):
                with contextlib.suppress(OSError):
                    _remove(left)

    def _delete(self, path: Path) -> None:
        """Remove a step if it is there, hidden first, so that half of it is never taken for the whole."""
        hidden = self._aside(step_number(path), "deleting")
        with contextlib.suppress(OSError):  # what cannot go now goes when a store is opened here again
            _remove(hidden)
            path.replace(hidden)
            reach_disk(self.directory)
            _remove(hidden)


def _remove(path: Path) -> None:
    """Remove a directory if it is there, or the link to one."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _locked(directory: Path) -> TextIO:
    """The lock file, held until it is closed or the process ends."""
    file = (directory / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        with file:
            raise ConfigError(
                f"trainer.default_local_dir={directory}: another run is at work there ({file.read().strip()}); end it, "
                "or name another directory"
            ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file
