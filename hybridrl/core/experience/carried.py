"""Responses of groups that are not trained on yet: what a checkpoint has of the work that is under way.

Has the methods of `Spool` that sources of episodes call, but keeps all in memory, and what is finished in a spool as
well, if there is one, until the next checkpoint has it. A response is found by its place in the run (prompt, sample,
turn), provided that its prompt is the same: the environment of a conversation may respond otherwise after a restart.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridrl.core.experience.spool import Spool, Spooled
from hybridrl.core.rollout import Completion, Request
from hybridrl.core.rollout.types import Key
from hybridrl.rewards.score import Score

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
