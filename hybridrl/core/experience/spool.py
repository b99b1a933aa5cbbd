"""The finished responses of the step under way, kept on disk, so that a crash late in a step does not cost its rollout.

One append-only file per step. A record is a response, with its score, under a hash of everything that determines it:
the bits of the weights, the settings of the engine, the prompt, the sampling parameters and the seed. So what is found
is what would be sampled again. A record that a kill cut off ends the file. Records are JSON and arrays: reading them
runs no code.
"""

import contextlib
import hashlib
import json
import math
import shutil
import struct
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

import numpy as np

from hybridrl.core.rollout import Completion, Request
from hybridrl.core.rollout.types import Key
from hybridrl.rewards.score import Score
from hybridrl.tracking.console import info, warn

HEADER = struct.Struct("<II")  # of a record: its bytes, and their CRC-32
KEPT = 2  # steps: the one under way, and the one before it while its checkpoint is being written


@dataclass(frozen=True)
class Spooled:
    """A response of an earlier process; `score` is None if it has to be scored again."""

    completion: Completion
    score: Score | None


class ResponseStore(Protocol):
    """Responses that were sampled before: those of a spool, or those carried from step to step."""

    def find(self, requests: Sequence[Request]) -> dict[int, Spooled]: ...
    def add(self, request: Request, completion: Completion, score: Future[Score] | None = None) -> None: ...


class Spool:
    """The spool of a run, in `directory`, which is deleted when the run ends well. `engine` and `reward` are
    fingerprints of what determines responses and scores besides a request and the weights. With `whole_steps` only a
    step whose rollout was complete is used again, as its responses depend on what is sampled with them. A disk that is
    full costs the spool, not the run."""

    def __init__(self, directory: Path, engine: str, reward: str, *, whole_steps: bool = False) -> None:
        self.directory, self.engine, self.reward, self.whole_steps = directory, engine, reward, whole_steps
        self.lock = threading.RLock()  # scores arrive in threads
        self.file: BinaryIO | None = None
        self.found: dict[str, Spooled] = {}
        self.step = self.used = 0
        self.origin = ""
        self.failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._close()
        if error is None:
            shutil.rmtree(self.directory, ignore_errors=True)

    def open(self, step: int, weights: str) -> None:
        """Start a step that samples with these weights: read what an earlier process has left of it."""
        self._close()
        self.step, self.used, self.origin = step, 0, _hash(f"{self.engine} {weights}")
        path = self.directory / f"step_{step}"
        try:
            self.directory.mkdir(exist_ok=True)
            for other in self.directory.glob("step_*"):
                number = other.name.removeprefix("step_")
                if number.isdecimal() and not step - KEPT < int(number) <= step:
                    _remove(other)
            if path.is_symlink() or not path.is_file():
                _remove(path)
            self.file = path.open("ab", buffering=0)
            self.found, size = self._read(path.read_bytes())
            self.file.truncate(size)
        except OSError as error:
            self._fail(error)

    def find(self, requests: Sequence[Request]) -> dict[int, Spooled]:
        """Return what earlier processes have sampled for these requests, by their indices."""
        if not self.found:
            return {}
        found = {}
        for index, request in enumerate(requests):
            spooled = self.found.get(self._key(request))
            if spooled is not None and len(spooled.completion.token_ids) <= request.sampling.max_tokens:
                found[index] = spooled
        self.used += len(found)
        return found

    def add(self, request: Request, completion: Completion, score: Future[Score] | None = None) -> None:
        """Append a response as soon as it has its score, if it is to be scored; a fault of the grader is not kept."""
        key = self._key(request)  # with the weights of now: the score may arrive in a later step

        def scored(future: Future[Score]) -> None:
            if future.exception() is None:
                self._append(self._record(key, completion, future.result()))

        if score is None:
            self._append(self._record(key, completion, None))
        else:
            score.add_done_callback(scored)

    def finish(self, count: int) -> None:
        """End the rollout of the step, which had this many responses."""
        if self.found:
            used = f"{self.used} responses of the {len(self.found)} that were spooled are used again"
            info(f"step {self.step}: {used if self.used else 'the spool is of other weights or settings: not used'}")
        if self.whole_steps:
            self._append(_encoded({"responses": count}))

    def _key(self, request: Request) -> str:
        return _hash(f"{self.origin} {request.seed} {request.sampling} {list(request.prompt_ids)}")

    def _record(self, key: str, completion: Completion, score: Score | None) -> bytes:
        meta = {
            "key": key,
            "truncated": completion.truncated,
            "versions": np.asarray(completion.versions).tolist(),
            "reward": self.reward,
            "score": vars(score) if score is not None and score.fault is None else None,
        }
        return _encoded(meta, completion.token_ids.astype("<i4"), completion.log_probs.astype("<f4"))

    def _append(self, record: bytes) -> None:
        with self.lock:
            if self.file is not None:
                try:
                    if self.file.write(record) < len(record):
                        raise OSError("no space left on device")
                except OSError as error:
                    self._fail(error)

    def _read(self, data: bytes) -> tuple[dict[str, Spooled], int]:
        """Return the responses of a file and the bytes that are used of it: less than all after a kill."""
        found, offset, complete, foreign = {}, 0, not self.whole_steps, 0
        while offset + HEADER.size <= len(data):
            size, checksum = HEADER.unpack_from(data, offset)
            record = data[offset + HEADER.size : offset + HEADER.size + size]
            if not size or len(record) < size or zlib.crc32(record) != checksum:
                break
            offset += HEADER.size + size
            text, _, arrays = record.partition(b"\n")
            try:
                meta = json.loads(text)
                if "responses" in meta:
                    complete = len(found) >= meta["responses"]
                else:
                    found[meta["key"]] = self._decoded(meta, arrays)
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                foreign += 1
        if foreign:
            warn(f"{self.directory}/step_{self.step}: {foreign} records are not of this version and are sampled again")
        return (found, offset) if complete else ({}, 0)

    def _decoded(self, meta: dict[str, Any], arrays: bytes) -> Spooled:
        """Return the response of a record. Raises ValueError, TypeError or KeyError for one of another version."""
        tokens, log_probs = np.frombuffer(arrays, "<i4").reshape(2, -1)
        versions, probs = np.array(meta["versions"]), log_probs.view("<f4")
        sound = versions.shape in ((), tokens.shape) and versions.dtype.kind == "i" and len(tokens) > 0
        if not (sound and isinstance(meta["truncated"], bool) and (tokens >= 0).all() and np.isfinite(probs).all()):
            raise ValueError("not a response")
        versions = int(versions) if versions.ndim == 0 else versions
        completion = Completion(tokens.astype(np.int64), probs, meta["truncated"], versions)
        if meta["score"] is None or meta["reward"] != self.reward:
            return Spooled(completion, None)
        score = Score(**meta["score"])
        texts = isinstance(score.detail, str) and isinstance(score.text, str | None)
        rewards = [0.0] * len(tokens) if score.token_rewards is None else score.token_rewards
        if score.fault is not None or not texts or not isinstance(score.extras, dict) or len(rewards) != len(tokens):
            raise ValueError("not a score")
        if score.value is None or not all(map(math.isfinite, [score.value, *rewards])):
            raise ValueError("not a finite score")
        return Spooled(completion, score)

    def _close(self) -> None:
        with self.lock:
            if self.file is not None:
                self.file.close()
                self.file = None

    def _fail(self, error: OSError) -> None:
        """Go without the spool for this step; deleting its file leaves the room to a checkpoint."""
        self._close()
        self.found = {}
        with contextlib.suppress(OSError):
            (self.directory / f"step_{self.step}").unlink()
        if not self.failed:
            warn(f"{self.directory}: {error}; training continues, but a crash would cost the rollout of its step")
        self.failed = True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _encoded(meta: dict[str, Any], *arrays: np.ndarray) -> bytes:
    record = b"".join((json.dumps(meta).encode(), b"\n", *(array.tobytes() for array in arrays)))
    return HEADER.pack(len(record), zlib.crc32(record)) + record


# -- in checkpoints ----------------------------------------------------------------------------------------------------
#
# Responses of groups that are not trained on yet: what a checkpoint has of the work that is under way.
#
# Has the methods of `Spool` that sources of episodes call, but keeps all in memory, and what is finished in a spool as
# well, if there is one, until the next checkpoint has it. A response is found by its place in the run (prompt, sample,
# turn), provided that its prompt is the same: the environment of a conversation may respond otherwise after a restart.

NAME = "carried"
# Of each response in a checkpoint: its place, the check of its prompt, its tokens, and two booleans.
COLUMNS = ("prompt", "sample", "turn", "check", "tokens", "truncated", "interrupted")
TOKENS = {"token_ids": np.int32, "log_probs": np.float32, "versions": np.int32}


def check_of(request: Request) -> int:
    return zlib.crc32(np.asarray(request.prompt_ids, dtype=np.int64).tobytes())


@dataclass(frozen=True)
class Kept:
    """A response, finished or interrupted; `score` is to come, or None where it is not scored by itself."""

    check: int
    completion: Completion
    score: Future[Score] | None


class Carried:
    """Responses by their place; `drop` forgets those of groups that were trained."""

    def __init__(self, spool: Spool | None = None) -> None:
        self.spool = spool
        self.kept: dict[Key, Kept] = {}
        self.scores: dict[Key, Score] = {}  # of an earlier process

    def find(self, requests: Sequence[Request]) -> dict[int, Spooled]:
        """Return what there is of these requests, by their indices; interrupted responses as well."""
        self._take_spooled(requests)
        found = {}
        for index, request in enumerate(requests):
            kept = self.kept.get(request.key)
            if kept is not None and kept.check == check_of(request):
                found[index] = Spooled(kept.completion, self.scores.get(request.key))
        return found

    def _take_spooled(self, requests: Sequence[Request]) -> None:
        """Keep what the spool has of these requests: it was finished after the checkpoint that the run resumed from."""
        for index, one in (self.spool.find(requests) if self.spool else {}).items():
            key = requests[index].key
            self.kept[key] = Kept(check_of(requests[index]), one.completion, None)
            if one.score is not None:
                self.scores[key] = one.score

    def add(self, request: Request, completion: Completion, score: Future[Score] | None = None) -> None:
        self.kept[request.key] = Kept(check_of(request), completion, score)
        if self.spool:
            self.spool.add(request, completion, score)

    def drop(self, positions: Iterable[int]) -> None:
        gone = set(positions)
        self.kept = {place: kept for place, kept in self.kept.items() if place[0] not in gone}
        self.scores = {place: score for place, score in self.scores.items() if place[0] not in gone}

    def state_dict(self, unfinished: Sequence[tuple[Request, Completion]]) -> dict[str, Any]:
        """Return all responses, with those that are interrupted, as arrays and plain values."""
        kept = dict(self.kept)
        kept |= {request.key: Kept(check_of(request), part, None) for request, part in unfinished}
        rows = [
            (*place, one.check, len(one.completion.token_ids), one.completion.truncated, one.completion.interrupted)
            for place, one in kept.items()
        ]
        state: dict[str, Any] = {f"{NAME}_responses": np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS))}
        for name, dtype in TOKENS.items():
            parts = [
                np.broadcast_to(getattr(one.completion, name), len(one.completion.token_ids)) for one in kept.values()
            ]
            state[f"{NAME}_{name}"] = np.concatenate([np.empty(0), *parts]).astype(dtype)
        scored = {place: one.score for place, one in kept.items() if one.score is not None and one.score.done()}
        done = {place: score.result() for place, score in scored.items() if score.exception() is None}
        scores = self.scores | done
        state[f"{NAME}_scores"] = [[list(place), vars(score)] for place, score in scores.items()]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        offset = 0
        for row in state.get(f"{NAME}_responses", ()):
            *place, check, count, truncated, interrupted = row.tolist()
            end = offset + count
            token_ids, log_probs, versions = (state[f"{NAME}_{name}"][offset:end] for name in TOKENS)
            whole = versions.astype(np.int64)
            same = int(whole[0]) if count and (whole == whole[0]).all() else whole
            completion = Completion(token_ids.astype(np.int64), log_probs, bool(truncated), same, bool(interrupted))
            self.kept[tuple(place)] = Kept(check, completion, None)
            offset = end
        for place, score in state.get(f"{NAME}_scores", ()):
            self.scores[tuple(place)] = Score(**score)
