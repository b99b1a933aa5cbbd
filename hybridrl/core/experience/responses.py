"""Store of sampled responses, so that a crash costs no rollout: a resumed run uses them instead of sampling again.

The finished responses of the step in progress are in the spool on disk: one append-only file per step. A record is a
response, with its score, under a hash of everything that determines it: the bits of the weights, the settings of the
engine, the prompt, the sampling parameters and the seed. So a stored response equals the one that would be sampled
again. A record that a kill cut off ends the file. Records are JSON and arrays: reading them runs no code.

Responses of groups that outlive a step are in every checkpoint as well, interrupted ones too. Such a response is found
by its place in the run (prompt, sample, turn), provided that its prompt is the same: the environment of a conversation
may respond differently after a restart.
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
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from hybridrl.core.carried import Fields, declared, identity
from hybridrl.core.rollout import Completion, Request, Sampling
from hybridrl.core.rollout.engine import Key
from hybridrl.required import required
from hybridrl.rewards.score import Score
from hybridrl.tracking.console import info, warn

HEADER = struct.Struct("<II")  # header of a record: its size in bytes, and their CRC-32
KEPT = 2  # steps: the current one, and the one before it while its checkpoint is being written
# Columns of responses in a checkpoint: place in the run, checksum of the prompt, number of tokens, and two booleans.
COLUMNS = ("prompt", "sample", "turn", "check", "tokens", "truncated", "interrupted")
Description = tuple[str, str, Sequence[int]]  # name, type and shape of an array
TOKENS = {"token_ids": np.int32, "log_probs": np.float32, "versions": np.int32}


@dataclass
class StoredResponse:
    """A response that was sampled before; `score` is None until it is scored, or if it has to be scored again."""

    completion: Completion
    score: Score | None = None
    check: int = 0  # checksum of its prompt, if it is carried


class ResponseStore:
    """The responses of a run. If it `carries` responses, those of groups that outlive a step are in memory until
    `drop`. With a `directory`, responses are also spooled there; it is deleted when the run succeeds.

    `engine` and `reward` are fingerprints of everything but request and weights that determines responses and scores.
    With `whole_steps` only a step with a complete rollout is used again, as its responses depend on each other. A full
    disk costs the spool, not the run.
    """

    def __init__(
        self,
        directory: Path | None = None,
        engine: str = "",
        reward: str = "",
        *,
        whole_steps: bool = False,
        carries: bool = False,
    ) -> None:
        self.directory, self.engine, self.reward, self.whole_steps = directory, engine, reward, whole_steps
        self.carries = carries
        self.carried: dict[Key, StoredResponse] = {}
        self.spooled: dict[str, StoredResponse] = {}  # by earlier processes, in the step in progress
        self.file: BinaryIO | None = None
        self.lock = threading.RLock()  # scores arrive in threads
        self.step = self.used = 0
        self.origin = ""
        # The last prompt with its sampling, and its text in keys: samples of a prompt follow one another.
        self.last: tuple[tuple[Sampling | None, Sequence[int], Fields], str] = ((None, [], {}), "")
        self.failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._close()
        if error is None and self.directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def open(self, step: int, weights: str) -> None:
        """Start a step that samples with these weights: read the responses that an earlier process has spooled."""
        self._close()
        self.step, self.used, self.origin = step, 0, _hash(f"{self.engine} {weights}")
        if self.directory is None:
            return
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
            self.spooled, size = self._read(path.read_bytes())
            self.file.truncate(size)
        except OSError as error:
            self._fail(error)

    def find(self, request: Request) -> StoredResponse | None:
        """Return the stored response to a request, or None; an interrupted one only if its group outlives the step."""
        spooled = self.spooled.get(self._key(self.origin, request)) if self.spooled else None
        if spooled is not None and len(spooled.completion.token_ids) <= request.sampling.max_tokens:
            self.used += 1
            self.carry(request, spooled)  # it was finished after the checkpoint that the run resumed from
            return spooled
        carried = self.carried.get(request.key)
        return carried if carried is not None and carried.check == _check_of(request) else None

    def add(self, request: Request, completion: Completion) -> None:
        """Keep a response, and spool it to disk."""
        response = StoredResponse(completion)
        self.carry(request, response)
        self._spool(self.spool_origin, request, response)

    def add_score(self, origin: str, request: Request, completion: Completion, score: Score) -> None:
        """Keep the score of a response, and spool both; faults of the grader are not spooled. `origin`: that of the
        store when the response was sampled, as the score may come in a later step."""
        if (carried := self.carried.get(request.key)) is not None:
            carried.score = score
        try:
            self._spool(origin, request, StoredResponse(completion, score))
        except (
            TypeError,
            ValueError,
            RecursionError,
        ):  # JSON cannot hold it: the response is scored again after a kill
            self._spool(origin, request, StoredResponse(completion))

    @property
    def spool_origin(self) -> str:
        """Hash of what determines responses now, except their requests; empty if they are not spooled."""
        return self.origin if self.file else ""

    def carry(self, request: Request, response: StoredResponse) -> None:
        """Keep a response in memory, if a run carries them."""
        if self.carries:
            response.check = _check_of(request)
            self.carried[request.key] = response

    def finish(self, count: int) -> None:
        """End the rollout of the step, which had `count` responses."""
        if self.spooled:
            used = f"{self.used} responses of the {len(self.spooled)} that were spooled are used again"
            info(f"step {self.step}: {used if self.used else 'the spool is of other weights or settings: not used'}")
        if self.whole_steps:
            self._append(_encoded({"responses": count}))

    def drop(self, positions: Iterable[int]) -> None:
        """Forget the responses of groups that were trained on."""
        dropped = set(positions)
        self.carried = {place: response for place, response in self.carried.items() if place[0] not in dropped}

    # -- in checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self, interrupted: Sequence[tuple[Request, Completion]]) -> dict[str, Any]:
        """Return all carried responses, and the `interrupted` ones, as arrays and plain values."""
        carried = dict(self.carried)  # episodes that continue in their thread may add to it
        saved = carried | {request.key: StoredResponse(part, None, _check_of(request)) for request, part in interrupted}
        rows, tokens = [], {name: [np.empty(0)] for name in TOKENS}
        for place, response in saved.items():
            part = response.completion
            rows.append((*place, response.check, len(part.token_ids), part.truncated, part.interrupted))
            for name, values in tokens.items():
                values.append(np.broadcast_to(getattr(part, name), len(part.token_ids)))
        scores = {place: response.score for place, response in carried.items() if response.score is not None}
        fields = [_described(response.completion.carried) for response in saved.values()]
        return {
            "carried_responses": np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS)),
            **{f"carried_{name}": np.concatenate(tokens[name]).astype(dtype) for name, dtype in TOKENS.items()},
            "carried_fields": [described for described, _ in fields],
            "carried_bytes": np.frombuffer(b"".join(chain.from_iterable(data for _, data in fields)), np.uint8),
            "carried_scores": [[list(place), score.as_dict()] for place, score in scores.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rows = state.get("carried_responses", ())
        end = 0
        for row, carried in zip(rows, _fields_of(state, len(rows)), strict=True):
            *place, check, count, truncated, interrupted = row.tolist()
            begin, end = end, end + count
            token_ids, log_probs, versions = (state[f"carried_{name}"][begin:end] for name in TOKENS)
            versions = versions.astype(np.int64)
            same = int(versions[0]) if count and (versions == versions[0]).all() else versions
            ended = bool(truncated), same, bool(interrupted)
            completion = Completion(token_ids.astype(np.int64), log_probs, *ended, carried)
            self.carried[tuple(place)] = StoredResponse(completion, None, check)
        for place, score in state.get("carried_scores", ()):
            self.carried[tuple(place)].score = Score(**score)

    # -- on disk -------------------------------------------------------------------------------------------------------

    def _key(self, origin: str, request: Request) -> str:
        (sampling, ids, carried), text = self.last
        if sampling is not request.sampling or ids is not request.prompt_ids or carried is not request.carried:
            text = f"{request.sampling} {list(request.prompt_ids)}{identity(request.carried).hex()}"
            self.last = (request.sampling, request.prompt_ids, request.carried), text
        return _hash(f"{origin} {request.seed} {text}")

    def _spool(self, origin: str, request: Request, response: StoredResponse) -> None:
        """Append a response to the file; without an origin there was none when it was sampled."""
        if not origin:
            return
        completion, score = response.completion, response.score
        described, data = _described(completion.carried)
        meta = {
            "key": self._key(origin, request),
            "truncated": completion.truncated,
            "versions": np.asarray(completion.versions).tolist(),
            "carried": described,
            "reward": self.reward,
            "score": score.as_dict() if score is not None and score.fault is None else None,
        }
        tokens, log_probs = completion.token_ids.astype("<i4"), completion.log_probs.astype("<f4")
        self._append(_encoded(meta, tokens.tobytes(), log_probs.tobytes(), *data))

    def _append(self, record: bytes) -> None:
        with self.lock:
            if self.file is not None:
                try:
                    if self.file.write(record) < len(record):
                        raise OSError("no space left on device")
                except OSError as error:
                    self._fail(error)

    def _read(self, data: bytes) -> tuple[dict[str, StoredResponse], int]:
        """Return the responses of a file and its number of valid bytes, which is less than its size after a kill."""
        responses, offset, complete, foreign = {}, 0, not self.whole_steps, 0
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
                    complete = len(responses) >= meta["responses"]
                else:
                    responses[meta["key"]] = self._decoded(meta, arrays)
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                foreign += 1
        if foreign:
            warn(f"{self.directory}/step_{self.step}: {foreign} records are not of this version and are sampled again")
        return (responses, offset) if complete else ({}, 0)

    def _decoded(self, meta: dict[str, Any], arrays: bytes) -> StoredResponse:
        """Return the response of a record. Raises ValueError, TypeError or KeyError for one of another version."""
        meta = dict(meta)
        earlier = [("routes", "<i2", shape)] if (shape := meta.get("routes")) else []
        carried, left = _read(meta.get("carried", earlier), memoryview(arrays))
        tokens, log_probs = np.frombuffer(left, "<i4").reshape(2, -1)
        versions, probs = np.array(meta["versions"]), log_probs.view("<f4")
        sound = versions.shape in ((), tokens.shape) and versions.dtype.kind == "i" and len(tokens) > 0
        if not (sound and isinstance(meta["truncated"], bool) and (tokens >= 0).all() and np.isfinite(probs).all()):
            raise ValueError("not a response")
        versions = int(versions) if versions.ndim == 0 else versions
        completion = Completion(tokens.astype(np.int64), probs, meta["truncated"], versions, carried=carried)
        score = None if meta["score"] is None or meta["reward"] != self.reward else Score(**meta["score"])
        if score is not None and not _is_sound(score, len(tokens)):
            raise ValueError("not a score")
        return StoredResponse(completion, score)

    def _close(self) -> None:
        with self.lock:
            if self.file is not None:
                self.file.close()
                self.file = None

    def _fail(self, error: OSError) -> None:
        """Run this step without the spool; deleting its file leaves its bytes to a checkpoint."""
        self._close()
        self.spooled = {}
        with contextlib.suppress(OSError):
            (required(self.directory) / f"step_{self.step}").unlink()
        if not self.failed:
            warn(f"{self.directory}: {error}; training continues, but a crash would cost the rollout of its step")
        self.failed = True


def _described(fields: Fields) -> tuple[Sequence[Description], list[bytes]]:
    """Return name, type and shape of each field that is stored, and its bytes."""
    stored = {name: value for name, value in fields.items() if declared(name).stored}
    described = [(name, value.dtype.str, value.shape) for name, value in stored.items()]
    return described, [value.tobytes() for value in stored.values()]


def _read(described: Sequence[Description], data: memoryview) -> tuple[dict[str, np.ndarray], memoryview]:
    """Return the fields whose bytes end the data, and the data before them. Raises ValueError for other fields."""
    fields = {}
    for name, dtype, shape in reversed(described):
        begin = len(data) - np.dtype(dtype).itemsize * math.prod(shape)
        fields[name], data = np.frombuffer(data[begin:], dtype).reshape(shape).copy(), data[:begin]
        if not declared(name).stored or not shape or fields[name].dtype.kind not in "biuf":
            raise ValueError("not a field")
    return fields, data


def _fields_of(state: Mapping[str, Any], count: int) -> list[dict[str, np.ndarray]]:
    """Return the fields of each response of a checkpoint; earlier versions had the routes at most."""
    described, data = state.get("carried_fields", [()] * count), state.get("carried_bytes", np.empty(0))
    if "carried_routes" in state:
        shapes, data = state["carried_route_shapes"].tolist(), state["carried_routes"]
        described = [[("routes", "<i2", shape)] if all(shape) else [] for shape in shapes]
    fields, left = [], memoryview(data.tobytes())
    for of_one in reversed(described):
        carried, left = _read(of_one, left)
        fields.append(carried)
    return fields[::-1]


def _is_sound(score: Score, tokens: int) -> bool:
    """Return whether a stored score is valid for a response with this number of tokens."""
    texts = isinstance(score.detail, str) and isinstance(score.text, str | None)
    rewards = [0.0] * tokens if score.token_rewards is None else score.token_rewards
    if score.fault is not None or not texts or not isinstance(score.extras, dict) or len(rewards) != tokens:
        return False
    return score.value is not None and all(map(math.isfinite, [score.value, *rewards]))


def _check_of(request: Request) -> int:
    return zlib.crc32(identity(request.carried), zlib.crc32(np.asarray(request.prompt_ids, dtype=np.int64).tobytes()))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _encoded(meta: dict[str, Any], *arrays: bytes) -> bytes:
    record = b"".join((json.dumps(meta).encode(), b"\n", *arrays))
    return HEADER.pack(len(record), zlib.crc32(record)) + record
