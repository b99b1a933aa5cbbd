"""Rollout engines: their interface, its requests, responses and statistics, and the entry that names an engine's class.

To add an engine, write a package whose class has the methods of RolloutEngine, and name its EngineEntry `engine.NAME`
in plugins.py, or by an entry point of another distribution.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import chain, combinations
from typing import ClassVar, Protocol, Self

import numpy as np

from hybridrl.config.schema import ModelConfig, RolloutConfig
from hybridrl.core.carried import PICTURE_DIGEST, PICTURE_START, Fields, continued
from hybridrl.core.pictures import NO_PIXELS, Pixels
from hybridrl.core.weights.sync import WeightTarget

Key = tuple[int, int, int]  # a request: prompt, sample, turn
LARGEST = 2**63 - 1  # torch's largest integer
STOP_CHARACTERS = 10_000  # limit for all stop texts of a request together: each is searched for after every token
REAL = ("temperature", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_p")  # in Sampling
WHOLE = ("top_k", "min_tokens")
ITERATION = ("fixed", "running_request", "prefilled_token")  # contributions to an iteration's time


@dataclass(frozen=True)
class Sampling:
    """Parameters of sampling; temperature 0 is greedy. Any of `stop_ids` ends a response, and so does the token that
    completes a text of `stop`. A response with a `json_schema` is constrained to match it."""

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

    @classmethod
    def of(cls, rollout: RolloutConfig, stop_ids: tuple[int, ...]) -> Self:
        """The sampling of responses that are trained on."""
        return cls(
            max_tokens=rollout.response_length,
            stop_ids=stop_ids,
            temperature=rollout.temperature if rollout.do_sample else 0.0,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            repetition_penalty=rollout.repetition_penalty,
            min_tokens=rollout.min_tokens,
            ignore_eos=rollout.ignore_eos,
            stop=tuple(rollout.stop),
        )

    @classmethod
    def of_validation(cls, rollout: RolloutConfig, stop_ids: tuple[int, ...]) -> Self:
        """The sampling of responses that are only scored."""
        validation, length = rollout.val_kwargs, rollout.response_length
        values = validation.temperature, validation.top_p, validation.top_k
        return cls(length, stop_ids, *values, stop=tuple(rollout.stop))


@dataclass(frozen=True)
class Request:
    """A request for one response to one prompt."""

    prompt: int  # requests with the same number share a prefix
    sample: int  # counts the responses to a prompt
    prompt_ids: list[int]
    seed: int  # determines the response's tokens
    sampling: Sampling
    turn: int = 0  # a later turn of an episode continues a context that a server has cached
    begun: int = 0  # number of the prompt's last tokens that are the beginning of an interrupted response
    # Called with tokens as they are sampled, in any thread; only in the engine's process.
    hear: Callable[[list[int]], object] | None = None
    carried: Fields = field(default_factory=dict)  # fields that the prompt brings
    prompt_log_probs: int | None = None  # k: also those of the prompt's tokens and of the k likeliest

    @property
    def key(self) -> "Key":
        return self.prompt, self.sample, self.turn

    @property
    def pictures(self) -> list[tuple[int, int]]:
        """Digest and first token of each picture of the prompt."""
        if PICTURE_DIGEST not in self.carried:
            return []
        fields = (self.carried.get(name, np.empty(0)).tolist() for name in (PICTURE_DIGEST, PICTURE_START))
        return list(zip(*fields, strict=True))

    def new_name(self) -> str:
        """Return a new name for the engine, as the same request may be sent several times."""
        return f"{self.prompt}-{self.sample}-{os.urandom(4).hex()}"

    def check(
        self, vocabulary: int, context: int, placeholders: Collection[int] = (), places: Sequence[range] = ()
    ) -> None:
        """Raise RejectedRequest if the request is invalid for this vocabulary and context length, in tokens.
        `placeholders` are the ids in place of pictures, first that of a picture; `places` are those of the pictures."""
        try:
            self._check(vocabulary, context)
            if placeholders:
                self._check_places(list(placeholders), [*chain(*places)])
        except (ValueError, TypeError) as error:
            raise RejectedRequest(str(error)) from error

    def _check(self, vocabulary: int, context: int) -> None:
        prompt, sampling = np.asarray(self.prompt_ids), self.sampling
        if not 0 < len(prompt) < context:
            longest = f"{context - 1} (rollout.max_model_len)"
            raise ValueError(f"the prompt has {len(prompt)} tokens; one may have 1 to {longest}")
        if prompt.ndim != 1 or prompt.dtype.kind != "i":
            raise TypeError("the prompt is not a list of token ids")
        if prompt.min() < 0 or prompt.max() >= vocabulary:
            wrong = int(prompt[(prompt < 0) | (prompt >= vocabulary)][0])
            raise ValueError(f"the prompt has the token id {wrong}; the model has 0 to {vocabulary - 1}")
        for name, value, least in (("seed", self.seed, 0), ("max_tokens", sampling.max_tokens, 1)):
            if type(value) is not int or not least <= value <= LARGEST:
                raise ValueError(f"{name}={value!r:.80} is not an integer from {least} to 2**63 - 1")
        for name, value in ((name, getattr(sampling, name)) for name in (*REAL, *WHOLE)):
            if type(value) is not int and not (name in REAL and type(value) is float):
                raise TypeError(f"{name}={value!r:.80} ({type(value).__name__}): it must be a number")
        if wrong := [text for text in sampling.stop if not (text and isinstance(text, str))]:
            raise TypeError(f"stop={wrong[0]!r:.80} ({type(wrong[0]).__name__}) is not text, or an empty string")
        if (size := sum(map(len, sampling.stop))) > STOP_CHARACTERS:
            raise ValueError(f"the texts of stop have {size} characters together, more than {STOP_CHARACTERS}")

    def _check_places(self, placeholders: list[int], expected: list[int]) -> None:
        marked = np.flatnonzero(np.isin(self.prompt_ids, placeholders))
        if wrong := sorted({*marked.tolist()} ^ {*expected}):
            kind = "a placeholder outside" if wrong[0] in marked else "no placeholder in"
            raise ValueError(
                f"token {wrong[0]} of the prompt is {kind} the places of its {len(self.pictures)} pictures"
            )
        if other := {self.prompt_ids[place] for place in expected} - {*placeholders[:1]}:
            raise ValueError(f"a picture's placeholder is the token id {placeholders[0]}, and not {other.pop()}")


@dataclass(frozen=True)
class Completion:
    """One response: its tokens [T] int64, the end token included, and their log-probs [T] float32 as sampled.

    `versions` is the weight version of each token: [T] int64, or one number for all tokens. An `interrupted` response
    is continued later, and may have no token yet. `carried` are fields that the engine fills, declared in
    core/carried.py.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    truncated: bool
    versions: np.ndarray | int
    interrupted: bool = False
    carried: Fields = field(default_factory=dict)

    def then(self, later: "Completion") -> "Completion":
        """Return both parts of a response as one. The engine has recomputed the first part with the weights of the
        second: a carried field with the join "last" has the second part's value."""
        if not len(self.token_ids):
            return later
        parts, sizes = (self, later), [len(part.token_ids) for part in (self, later)]
        return replace(
            later,
            token_ids=np.concatenate([part.token_ids for part in parts]),
            log_probs=np.concatenate([part.log_probs for part in parts]),
            versions=np.concatenate([np.broadcast_to(part.versions, len(part.token_ids)) for part in parts]),
            carried=continued(self.carried, later.carried, sizes),
        )


class RequestFault(RuntimeError):
    """A request that cannot be sampled, while the engines sample others: a fault of its episode, named by `kind`."""

    kind: ClassVar[str]


class RejectedRequest(RequestFault):
    """A request that the engine rejects."""

    kind = "rejected"


class FatalRequest(RequestFault):
    """A request during which engines died repeatedly."""

    kind = "engine died"


@dataclass(frozen=True)
class Goal:
    """Stop condition of sampling: for each (prompts, count), at least `count` of the prompts have all responses."""

    needs: Sequence[tuple[Collection[int], int]]

    def reached(self, complete: Collection[int]) -> bool:
        return all(sum(prompt in prompts for prompt in complete) >= count for prompts, count in self.needs)


class Progress:
    """Whether a goal is reached, from the names of all requests and of the responses that finish."""

    def __init__(self, goal: Goal, names: Iterable[str]) -> None:
        self.goal, self.complete = goal, set[int]()
        self.prompts = {name: int(name.partition("-")[0]) for name in names}
        self.missing = Counter(self.prompts.values())

    def __call__(self, name: str) -> bool:
        prompt = self.prompts.get(name)
        if prompt is None:
            return False
        self.missing[prompt] -= 1
        if not self.missing[prompt]:
            self.complete.add(prompt)
        return self.goal.reached(self.complete)


def request_seed(run_seed: int, *keys: int | str) -> int:
    """Derive the seed of one response from the run's seed and its place in the run, such as position and sample."""
    text = "/".join(map(str, (run_seed, *keys)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") & 0x7FFFFFFF


def continuation(request: Request, part: Completion) -> Request:
    """Return the request for the rest of a partly sampled response; its seed derives from the tokens so far."""
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


@dataclass
class EngineStats:
    """Counts of one engine, over the time in which it had requests. `seconds`: time by number of running requests.

    `products` = X^T X and `moments` = X^T y of a least-squares fit: X has the columns of ITERATION and one row per
    iteration, y the iterations' seconds.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    products: np.ndarray = field(default_factory=lambda: np.zeros((len(ITERATION), len(ITERATION))))
    moments: np.ndarray = field(default_factory=lambda: np.zeros(len(ITERATION)))
    cache_seconds: float = 0.0  # the share of the cache in use, over time
    cache_peak: float = 0.0
    waiting_peak: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens that were looked up in the prefix cache
    prefix_hits: int = 0
    tokens: int = 0  # sampled

    def observe(self, seconds: float, running: int, waiting: int, cache: float, prefilled: int) -> None:
        """Add an iteration of `seconds` that prefilled `prefilled` tokens; the other values are those at its end."""
        self.seconds[running] = self.seconds.get(running, 0.0) + seconds
        had = np.array([1, running, prefilled])
        self.products += np.outer(had, had)
        self.moments += had * seconds
        self.cache_seconds += seconds * cache
        self.cache_peak = max(self.cache_peak, cache)
        self.waiting_peak = max(self.waiting_peak, waiting)

    @property
    def busy(self) -> float:
        return sum(self.seconds.values())

    @property
    def tail(self) -> float:
        """The seconds in which fewer than half as many requests ran as at the peak."""
        return sum(seconds for running, seconds in self.seconds.items() if 2 * running < max(self.seconds))


class RolloutEngine(WeightTarget, Protocol):
    """An engine over one tensor-parallel group of devices, in the process of its rollout server.

    It is made with dummy weights: `connect` is called once, and weights come from the trainer at every weight sync.
    A call raises if the engine is dead.
    """

    async def connect(self) -> None:
        """Prepare to receive weights."""

    async def generate(self, request: Request, pixels: Mapping[int, Pixels] = NO_PIXELS) -> Completion:
        """Sample one response; many calls run concurrently. `pixels` has those of the prompt's pictures, by digest.
        Raises RequestFault if the engine rejects the request. Must queue the request before its first await: `hold` and
        `release` rely on it."""

    async def hold(self) -> None:
        """Queue requests without starting them, with an empty prefix cache."""

    async def release(self, goal: Goal | None = None) -> None:
        """Start all queued requests, and interrupt them by itself once the goal is reached."""

    async def interrupt(self) -> None:
        """End all requests now: `generate` returns the partial responses, which may be continued later."""

    async def sleep(self) -> None:
        """Drop the cache and free device memory until `wake`."""

    async def wake(self, part: str) -> None:
        """Allocate memory for `weights` or `kv_cache`; the engine can generate once it has both."""

    async def check(self) -> int:
        """Return the number of tokens sampled so far, which grows while it works; RuntimeError if it is dead."""

    async def take_stats(self) -> EngineStats:
        """Return the statistics since the last call."""


@dataclass(frozen=True)
class EngineEntry:
    """Module and name of an engine's class, imported in the server's process only, and the environment it needs.
    `cache_bytes` is the key, below the rollout's section, for the size of its cache. On CPU a block of the cache has
    `cpu_block` tokens."""

    module: str
    name: str
    environment: Callable[[RolloutConfig], dict[str, str]]
    cache_bytes: str = ""
    cpu_block: int = 1

    def build(self, device: str, model: ModelConfig, rollout: RolloutConfig, engines_per_machine: int) -> RolloutEngine:
        return vars(import_module(self.module))[self.name](device, model, rollout, engines_per_machine)


def engine_metrics(engines: Sequence[EngineStats], slots: int) -> dict[str, float]:
    """Return the metrics of all engines; each may run `slots` requests at a time. Preemptions and tokens per second are
    sums, means are weighted by time, maxima and tail are of the worst engine. Empty if no engine had requests."""
    busy = [engine for engine in engines if engine.busy > 0]
    if not busy:
        return {}
    seconds, queries = sum(engine.busy for engine in busy), sum(engine.prefix_queries for engine in busy)
    requests = sum(count * spent for engine in busy for count, spent in engine.seconds.items())
    return {
        "rollout/preemptions": sum(engine.preemptions for engine in busy),
        "rollout/kv_cache_usage/max": max(engine.cache_peak for engine in busy),
        "rollout/kv_cache_usage/mean": sum(engine.cache_seconds for engine in busy) / seconds,
        "rollout/running_requests/max": max(max(engine.seconds) for engine in busy),
        "rollout/running_requests/mean": requests / seconds,
        "rollout/busy_share": requests / seconds / slots,
        "rollout/waiting_requests/max": max(engine.waiting_peak for engine in busy),
        "rollout/prefix_cache_hit_share": sum(engine.prefix_hits for engine in busy) / queries if queries else 0.0,
        "rollout/tokens_per_s": sum(engine.tokens / engine.busy for engine in busy),
        "rollout/tail_share": max(engine.tail / engine.busy for engine in busy),
        "rollout/last_request_share": max(_alone(engine) / engine.busy for engine in busy),
    } | _speed(busy)


def _alone(engine: EngineStats) -> float:
    return engine.seconds.get(1, 0.0) if max(engine.seconds) > 1 else 0.0


def _speed(engines: Sequence[EngineStats]) -> dict[str, float]:
    """Return the seconds of an iteration as a linear function of its running requests and prefilled tokens, fitted by
    non-negative least squares: all subsets of coefficients are tried, and the best non-negative fit is returned."""
    zero = np.zeros(())
    gram, moments = sum((stats.products for stats in engines), zero), sum((stats.moments for stats in engines), zero)
    best, least = np.zeros(len(ITERATION)), 0.0
    for size in range(1, len(ITERATION) + 1):
        for parts in map(list, combinations(range(len(ITERATION)), size)):
            fitted = np.zeros(len(ITERATION))
            fitted[parts] = np.linalg.lstsq(gram[np.ix_(parts, parts)], moments[parts], rcond=None)[0]
            error = float(fitted @ gram @ fitted - 2 * fitted @ moments)  # without the same constant of every choice
            if (fitted >= 0).all() and error < least:
                best, least = fitted, error
    return {f"rollout/iteration_s/{name}": seconds for name, seconds in zip(ITERATION, best.tolist(), strict=True)}
