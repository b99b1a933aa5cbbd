"""Requests and responses, of a rollout engine and as the client of its server has them in flight."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import ClassVar, Protocol

import numpy as np

from hybridrl.core.cluster.dispatch import ActorJob

Key = tuple[int, int, int]  # of a request: prompt, sample, turn


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled; temperature 0 is greedy. Any of `stop_ids` ends a response, and so does a text of
    `stop`, with the token that completes it. One with a `json_schema` is constrained to match it."""

    max_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    json_schema: str | None = None


@dataclass(frozen=True)
class Request:
    """One response wanted to one prompt. Requests with the same `prompt` number share a prefix, and `sample` counts
    them; a later `turn` of an episode continues what a server has cached. The last `begun` tokens of the prompt are the
    beginning of the response, which was interrupted."""

    prompt: int
    sample: int
    prompt_ids: list[int]
    seed: int
    sampling: Sampling
    turn: int = 0
    begun: int = 0

    @property
    def key(self) -> "Key":
        return self.prompt, self.sample, self.turn


@dataclass(frozen=True)
class Completion:
    """One response: its tokens [T] int64, the end token included, and their log-probs [T] float32 as sampled.

    `versions` is the weight version that each token was sampled with: [T] int64, or one number for all of them. One
    that was `interrupted` is to be continued, and may have no token yet.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    truncated: bool
    versions: np.ndarray | int
    interrupted: bool = False

    def then(self, later: "Completion") -> "Completion":
        """Return both parts of a response as one."""
        if not len(self.token_ids):
            return later
        parts = (self, later)
        return replace(
            later,
            token_ids=np.concatenate([part.token_ids for part in parts]),
            log_probs=np.concatenate([part.log_probs for part in parts]),
            versions=np.concatenate([np.broadcast_to(part.versions, len(part.token_ids)) for part in parts]),
        )


class RequestFault(RuntimeError):
    """A request that cannot be sampled, while the engines sample others: a fault of its episode, named by `kind`."""

    kind: ClassVar[str]


class RejectedRequest(RequestFault):
    """A request that the engine rejects."""

    kind = "rejected"


class FatalRequest(RequestFault):
    """A request during which engines died."""

    kind = "engine died"


@dataclass(frozen=True)
class Goal:
    """Condition of having sampled enough: of each of these sets of prompts, so many have all their responses."""

    needs: Sequence[tuple[Collection[int], int]]

    def reached(self, complete: Collection[int]) -> bool:
        return all(sum(prompt in some for prompt in complete) >= count for some, count in self.needs)


def request_seed(run_seed: int, *keys: int | str) -> int:
    """Derive the seed of one response from the run's seed and its place in the run, such as position and sample."""
    text = "/".join(map(str, (run_seed, *keys)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") & 0x7FFFFFFF


def continuation(request: Request, part: Completion) -> Request:
    """Return the request for the rest of a response of which a part is sampled. Its seed derives from the number of
    tokens that there are."""
    begun, sampling = len(part.token_ids), request.sampling
    if not begun:
        return request
    left = {"max_tokens": sampling.max_tokens - begun, "min_tokens": max(sampling.min_tokens - begun, 0)}
    return replace(
        request,
        prompt_ids=[*request.prompt_ids, *part.token_ids.tolist()],
        seed=request_seed(request.seed, begun),
        sampling=replace(sampling, **left),
        begun=begun,
    )


class ServerState(Enum):
    """A rollout server as its client knows it; one that has no weights yet gets them with the next weight sync."""

    LIVE = "live"
    REBUILDING = "rebuilding"
    WAITING_FOR_WEIGHTS = "waiting for weights"


class ServerHandle(Protocol):
    """A rollout server as the client uses it; awaited calls raise ActorLost."""

    def submit(self, requests: list[tuple[int, Request]], goal: Goal | None = None) -> None: ...
    def interrupt(self) -> None: ...
    async def take(self) -> list[tuple[int, Completion | RequestFault]]: ...
    async def check(self) -> int: ...  # the tokens that its engine has sampled so far
    async def activity(self) -> str: ...  # where its processes are
    def kill(self) -> None: ...


@dataclass(eq=False)
class PendingRequest(ActorJob):
    """A request in flight, and what was sampled before an interruption. One that is `suspect` may have caused the death
    of a server."""

    request: Request
    begun: Completion | None = None
    suspect: bool = field(default=False, init=False)

    def rest(self) -> Request:
        """Return the request for what is missing."""
        return self.request if self.begun is None else continuation(self.request, self.begun)
