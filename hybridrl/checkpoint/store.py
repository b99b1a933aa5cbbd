"""The checkpoints of a run: listing, choosing and retaining them, and publishing new ones atomically.

A checkpoint is written in a hidden directory and appears by one rename, so it is complete or absent. Hidden directories
are never checkpoints: `.writing` is unfinished, `.replaced` was superseded by a newer checkpoint of its step,
`.deleting` is being removed. The contents of a checkpoint are not interpreted, except `state.json`.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from hybridrl.checkpoint.files import faults, flush_to_disk, is_intact, publish, write_manifest
from hybridrl.config import ConfigError
from hybridrl.config.files import SHARDS, VERL_SHARDS, read_mapping
from hybridrl.tracking.console import info

STATE = "state.json"
LOCK = ".lock"  # held by the run that uses a directory
LOOK_SECONDS = 5.0  # at most that `holder` of another process keeps a run from locking its directory
LATEST = "latest_checkpointed_iteration.txt"  # for people and other tools; never read here

REQUIRED = {"healthy", "recovery", "metrics"}
# Parts of a state, as the index of its shards names them: pickle writes a text after its length.
WEIGHTS, PARTS = b"\x8c\x05model", re.compile(rb"\x8c(?:\x05model|\x05extra|\x09optimizer)")
STATE_KINDS = {"healthy": bool, "recovery": bool, "metrics": dict, "published": int}
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # file systems without locks cannot detect a second run


class SaveFailed(RuntimeError):
    """A checkpoint could not be saved; earlier ones are intact."""

    code = "save-failed"


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint. Its `state` has "healthy" and "recovery" (bool), "metrics" (numbers by name), "published"
    (its rank in order of publication), "reason" if it is not healthy, and whatever else the driver stored."""

    step: int
    path: Path
    state: dict[str, Any]


def list_checkpoints(directory: Path) -> list[Checkpoint]:
    """Return the checkpoints of a directory in order of publication, which is by step unless a run went back. A damaged
    state is left out: a wrong order would delete other checkpoints. Takes no lock."""
    intact = (read_checkpoint(path) for path in step_directories(directory) if is_intact(path, STATE))
    return sorted((saved for saved in intact if saved is not None), key=lambda saved: saved.state["published"])


def read_checkpoint(path: Path) -> Checkpoint | None:
    """Return a checkpoint, intact or not, or None if its state is missing or unreadable."""
    try:
        state = read_mapping(path / STATE)
    except ValueError:
        return None
    kinds = {name: type(state.get(name)) for name in STATE_KINDS}
    sound = kinds == STATE_KINDS and all(isinstance(value, int | float) for value in state["metrics"].values())
    return Checkpoint(step_number(path), path, state) if sound else None


def lacks(path: Path) -> str:
    """Return why no run can resume from a checkpoint: the weights of a model were not saved in shards. Empty if they
    were; saved files may be damaged. Moments and the schedule's position are not required: a run that resumes without
    them reports it."""
    for name in ("actor", "critic"):
        index = path / name / SHARDS
        if not index.parent.is_dir() or faults(path, f"{name}/{SHARDS}"):
            continue
        parts = PARTS.findall(index.read_bytes()) if index.is_file() else []
        if not index.is_file() or (parts and WEIGHTS not in parts):
            return f"{'' if name == 'actor' else f'{name}: '}{'no weights' if parts else 'model only'}"
    return ""


def resumable(directory: Path) -> list[Checkpoint]:
    """Return the checkpoints of a directory that lack nothing, in order of publication."""
    return [saved for saved in list_checkpoints(directory) if not lacks(saved.path)]


def damage_of(path: Path) -> list[str]:
    """Return the faults of a checkpoint: that it is not healthy, and each damaged file."""
    damaged, checkpoint = faults(path), read_checkpoint(path)
    if checkpoint is None:
        return damaged or [f"{STATE}: not the state of a checkpoint"]
    state = checkpoint.state
    return damaged if state["healthy"] else [f"not healthy: {state.get('reason', 'no reason was recorded')}", *damaged]


def lineage(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints that led to the newest one, from a list in order of publication. A run that went back, by
    an explicit path or past a damaged checkpoint, has abandoned the checkpoints of later steps."""
    line: list[Checkpoint] = []
    for newer in checkpoints:
        line = [older for older in line if older.step < newer.step] + [newer]
    return line


def newest_good(directory: Path, log: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest intact and healthy checkpoint from which a run can resume; log each skipped one with the
    reason."""
    checkpoints = {saved.path: saved for saved in list_checkpoints(directory)}
    current = {saved.path for saved in lineage(list(checkpoints.values()))}
    for path in reversed(step_directories(directory)):
        if is_verl(path):
            continue
        abandoned = path in checkpoints and path not in current
        lack = "the run has since gone back to an earlier checkpoint" if abandoned else lacks(path)
        reasons = [lack] if lack else damage_of(path)
        if path in checkpoints and not reasons:
            return checkpoints[path]
        log(f"{path} is skipped: {'; '.join(reasons[:3])}{'; and more' if len(reasons) > 3 else ''}")
    return None


def retained(checkpoints: list[Checkpoint], keep: int | None, keep_best: str | None) -> list[Checkpoint]:
    """Return the checkpoints to retain, from a list in order of publication; see `Store`. Any checkpoint supersedes a
    recovery checkpoint, an unhealthy one supersedes no other, and abandoned ones are deleted first."""
    healthy = [saved for saved in checkpoints if saved.state["healthy"]]
    regular = [saved for saved in checkpoints if not saved.state["recovery"]]
    current = {saved.step for saved in lineage(checkpoints)}
    candidates = sorted((saved for saved in regular if saved.state["healthy"]), key=lambda saved: saved.step in current)
    result = [*checkpoints[-1:], *healthy[-1:], *(regular if keep is None else candidates[-keep:])]
    if keep_best:
        name, sign = keep_best.removeprefix("-"), -1 if keep_best.startswith("-") else 1
        measured = [saved for saved in candidates if not math.isnan(saved.state["metrics"].get(name, math.nan))]
        result += sorted(measured, key=lambda saved: sign * saved.state["metrics"][name])[-1:]
    return result


def step_directories(directory: Path) -> list[Path]:
    """Return every `global_step_N` of a directory, intact or not, by step."""
    paths = (path for path in directory.glob("global_step_*") if re.fullmatch(r"global_step_\d+", path.name))
    return sorted(paths, key=step_number)


def step_number(path: Path) -> int:
    """Return the N in the name of a checkpoint's directory, hidden or not."""
    return int(re.findall(r"\d+", path.name)[0])


def is_verl(path: Path) -> bool:
    """Return whether verl saved a checkpoint."""
    return any(True for _ in path.glob(f"actor/{VERL_SHARDS}"))


class Store:
    """The checkpoints of one run at a time, `<directory>/global_step_N`. `keep`: number of retained ones (None: all).
    `keep_best`: a metric; the checkpoint with its greatest value is retained too (with a leading "-", the least value).
    With `leave`, earlier checkpoints without weights in shards stay, in any number: this run starts from scratch, and
    nothing else is left of the run before. Raises ConfigError if another run uses the directory."""

    def __init__(
        self, directory: Path, *, keep: int | None = None, keep_best: str | None = None, leave: bool = False
    ) -> None:
        assert keep is None or keep > 0
        self.directory, self.keep, self.keep_best, self.leave = directory, keep, keep_best, leave
        self.left: set[Path] = set()
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(directory)
        self._leave()
        for writing in directory.glob(".global_step_*.writing"):
            if state := _complete_state(writing):  # completely on disk; the run ended before publishing it
                try:
                    info(f"{self._publish(step_number(writing), state).path} is complete: published")
                except OSError as error:  # remove nothing: it may succeed when there is space
                    self.close()
                    raise SaveFailed(f"{writing} is complete and could not be published: {error}") from error
        self._clean()
        self._leave()

    def _leave(self) -> None:
        self.left = {path for path in step_directories(self.directory) if self.leave and lacks(path)}

    def close(self) -> None:
        """Release the directory; the end of the process does so too."""
        self._lock.close()

    def begin(self, step: int) -> Path:
        """Return an empty directory to write a checkpoint into."""
        writing = self._hidden(step, "writing")
        try:
            self._clean(step)
            writing.mkdir()
        except OSError as error:
            raise self.failed(step, error) from error
        return writing

    def complete(self, step: int, state: dict[str, Any]) -> None:
        """Write the state of a checkpoint. Afterwards only the shards of the models in state["sharded"] are missing."""
        _write_state(self._hidden(step, "writing"), state)

    def is_written(self, step: int, sharded: list[str]) -> bool:
        """Return whether all shards of these models are on disk."""
        return _has_shards(self._hidden(step, "writing"), sharded)

    def publish(self, step: int, state: dict[str, Any]) -> Checkpoint:
        """Publish a written checkpoint with its state, then delete those not retained. May run in a thread."""
        try:
            return self._publish(step, state)
        except OSError as error:
            raise self.failed(step, error) from error

    def _publish(self, step: int, state: dict[str, Any]) -> Checkpoint:
        assert state.keys() >= REQUIRED
        writing, final = self._hidden(step, "writing"), self.directory / f"global_step_{step}"
        replaced, latest = self._hidden(step, "replaced"), self.directory / f".{LATEST}.writing"
        older = [saved for saved in list_checkpoints(self.directory) if saved.step != step]
        state = state | {"published": 1 + max((saved.state["published"] for saved in older), default=0)}
        older = [saved for saved in older if saved.path not in self.left]
        _write_state(writing, state)
        write_manifest(writing)
        publish(writing, final, replaced)
        latest.write_text(str(step))
        publish(latest, self.directory / LATEST)
        published = Checkpoint(step, final, state)
        remaining = {saved.path for saved in retained([*older, published], self.keep, self.keep_best)}
        for path in (replaced, *(saved.path for saved in older if saved.path not in remaining)):
            self._delete(path)
        return published

    def failed(self, step: int, error: Exception) -> SaveFailed:
        """Abandon a checkpoint that could not be written and return the exception to raise."""
        free = ""
        with contextlib.suppress(OSError):  # on a disk that fails entirely, report the first error
            free = f", where {shutil.disk_usage(self.directory).free / 1e9:.1f} GB were free"
            self._clean(step)
        failed = SaveFailed(
            f"step {step} could not be saved in {self.directory}{free}: {error}; earlier checkpoints are intact"
        )
        failed.__cause__ = error
        return failed

    def last(self) -> Path | None:
        """Return the newest resumable checkpoint that was healthy when saved."""
        return next((saved.path for saved in reversed(resumable(self.directory)) if saved.state["healthy"]), None)

    def _hidden(self, step: int, kind: str) -> Path:
        return self.directory / f".global_step_{step}.{kind}"

    def _clean(self, step: int | str = "*") -> None:
        """Restore a checkpoint if its replacement never appeared; remove half-written and half-deleted ones."""
        for replaced in self.directory.glob(f".global_step_{step}.replaced"):
            final = self.directory / f"global_step_{step_number(replaced)}"
            if final.exists():
                self._delete(replaced)
            else:
                replaced.replace(final)
        for kind in ("writing", "deleting"):
            for path in self.directory.glob(f".global_step_{step}.{kind}"):
                with contextlib.suppress(OSError):
                    _remove(path)

    def _delete(self, path: Path) -> None:
        """Remove a checkpoint, if it exists. It is hidden first, so that a partial one is never seen."""
        hidden = self._hidden(step_number(path), "deleting")
        with contextlib.suppress(OSError):  # on failure, the next store of this directory deletes the rest
            _remove(hidden)
            path.replace(hidden)
            flush_to_disk(self.directory)
            _remove(hidden)


def _write_state(writing: Path, state: dict[str, Any]) -> None:
    """Write state.json atomically: until the checkpoint is published, a kill must leave the state before."""
    temporary = writing / f".{STATE}.writing"
    temporary.write_text(json.dumps(state, indent=1), encoding="utf-8")
    flush_to_disk(temporary)
    temporary.replace(writing / STATE)


def _has_shards(directory: Path, sharded: list[str]) -> bool:
    """Return whether all shards of these models are on disk: torch.distributed.checkpoint writes the index after every
    rank has written and flushed its shard."""
    return all((directory / name / SHARDS).is_file() for name in sharded)


def _complete_state(writing: Path) -> dict[str, Any] | None:
    """Return the state of a checkpoint that is completely on disk; None if something is missing."""
    try:
        state = read_mapping(writing / STATE)
        return state if _has_shards(writing, state["sharded"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove(path: Path) -> None:
    """Remove a directory, or only the link to one, if it exists."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def holder(directory: Path) -> str:
    """Return the process that uses a directory now; empty: none does, or the file system has no locks."""
    try:
        with (directory / LOCK).open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() or "an unnamed process"
    except OSError:
        pass
    return ""


def _locked(file: TextIO) -> bool:
    """Lock a file, and return whether that was possible. Raises BlockingIOError if a run holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)
        return False
    return True


def _lock(directory: Path) -> TextIO:
    """Return the lock file, locked until it is closed or the process ends."""
    file = (directory / LOCK).open("a+", encoding="utf-8")
    until = time.monotonic() + LOOK_SECONDS
    try:
        while not _locked(file):  # `holder` may hold it for a moment
            if time.monotonic() > until:
                raise BlockingIOError
            time.sleep(0.01)
    except BlockingIOError:
        file.seek(0)
        with file:
            cause = f"trainer.default_local_dir={directory}: another run is using it ({file.read().strip()})"
        raise ConfigError(cause, fix="stop that run, or set another directory") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file
