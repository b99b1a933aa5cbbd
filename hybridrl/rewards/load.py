"""Turn the reward configuration into a function from requests to scores, rejecting what cannot work before a run.

Nothing of the user's is called here except the import of the file. verl's reward managers come down to how the function
is called: naive, prime, remote and gdpo are the same here, since every function runs in processes with a time limit.
"""

import functools
import inspect
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import SequenceMatcher
from types import ModuleType
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.config.custom_code import load_module
from hybridrl.config.schema_algorithm import RewardConfig
from hybridrl.config.values import REWARD_MANAGERS
from hybridrl.rewards import built_in
from hybridrl.rewards.binding import BATCH_KEYWORDS, REQUEST_KEYWORDS, Bound, bind
from hybridrl.rewards.score import Score, ScoringRequest, combined, to_score
from hybridrl.rewards.verl_names import provide_verl_imports

_CUSTOM = "reward.custom_reward_function"
_MANAGER = "reward.reward_manager"
# Coroutines that one process runs concurrently. Other functions are called one at a time.
COROUTINES = 64


@dataclass(frozen=True)
class Reward:
    """The main function, further functions by name, and weights; all are applied to every response."""

    main: Bound | None
    further: dict[str, Bound]
    weights: dict[str, float]

    @property
    def is_async(self) -> bool:
        """Whether calls may overlap: at least one function is a coroutine function."""
        return any(function.is_async for function in self._functions())

    @property
    def takes_tokens(self) -> bool:
        """Whether a function reads the token ids of the response."""
        return any("response_ids" in function.keywords for function in self._functions())

    def score(self, request: ScoringRequest) -> Score:
        """Score one response; raises what the functions raise."""
        return self._combined(self.main(request) if self.main else 0.0, request)

    def score_all(self, requests: list[ScoringRequest]) -> list[Score]:
        """Score all responses in one call of the main function; raises what the functions raise."""
        assert self.main is not None
        returned = list(self.main.call_batch(requests))
        if len(returned) != len(requests):
            detail = f"returned {len(returned)} scores for {len(requests)} responses"
            return [Score(None, fault="type", detail=detail)] * len(requests)
        return [self._combined(value, request) for value, request in zip(returned, requests, strict=True)]

    def _combined(self, returned: Any, request: ScoringRequest) -> Score:
        score = to_score(returned, needs_score=not self.weights or "score" in self.weights)
        if not self.further and not self.weights:
            return score
        further = {name: to_score(function(request)) for name, function in self.further.items()}
        return combined(score, further, self.weights)

    def _functions(self) -> list[Bound]:
        return [*self.further.values(), *([self.main] if self.main else [])]


def load_reward(config: RewardConfig, data_sources: Collection[str] = (), *, cpu_limited: bool = False) -> Reward:
    """Load the custom function if a path is set, else the built-in scorers of `data_sources`.

    `cpu_limited`: the kernel ends this process (SIGPROF) when a built-in scorer needs more than `built_in.CPU_SECONDS`
    for one response.
    """
    further = {
        name: bind(custom_function(str(path), f"reward.functions.{name}"), {}, config.timeout, name, REQUEST_KEYWORDS)
        for name, path in config.functions.items()
    }
    main = None
    if uses_main(config):
        function, fixed = _main_function(config, data_sources, cpu_limited)
        if config.reward_manager.source == "importlib":
            function, fixed = _custom_manager(config), {"compute_score": functools.partial(function, **fixed)}
        keywords = BATCH_KEYWORDS if in_one_call(config) else REQUEST_KEYWORDS
        main = bind(function, fixed, config.timeout, _CUSTOM, keywords)
    return Reward(main, further, config.weights)


def uses_main(config: RewardConfig) -> bool:
    """Whether the custom or built-in function is called: not if only further functions have a weight."""
    return not config.weights or not set(config.weights) <= set(config.functions)


def uses_built_in(config: RewardConfig) -> bool:
    """Whether the built-in scorers are called."""
    return uses_main(config) and config.custom_reward_function.path is None


def custom_function(name: str, key: str) -> Callable[..., Any]:
    """Return the function at `path/to/file.py:function`; without a colon, the one called compute_score."""
    path, colon, function = name.rpartition(":")
    path, function = (path, function) if colon and not function.startswith("//") else (name, "compute_score")
    return _member(path, key, function, f"{key}={name}")


def in_one_call(config: RewardConfig) -> bool:
    """Whether the function takes all responses of a step in one call (verl's manager "batch")."""
    return config.reward_manager.source == "register" and config.reward_manager.name == "batch"


def processes(config: RewardConfig) -> int:
    """Return how many scoring processes can be used; 0: none is wanted."""
    most = 1 if in_one_call(config) else config.max_concurrent if _is_limited(config) else config.num_workers
    return min(config.num_workers, most)


def calls_at_once(config: RewardConfig, is_async: bool) -> int:
    """Return the concurrent calls per process."""
    if _is_limited(config):
        return max(config.max_concurrent // max(processes(config), 1), 1)
    return COROUTINES if is_async else 1


def seconds_between_calls(config: RewardConfig) -> float:
    """Return the seconds between calls of each process with which all together keep the limits of `rate_limited`."""
    if not _is_limited(config):
        return 0.0
    by_tokens = config.max_tpm / config.estimated_tokens_per_request if config.max_tpm else None
    rates = [rate for rate in (config.max_rpm, by_tokens) if rate]
    return max(processes(config), 1) * 60 / min(rates) if rates else 0.0


def _is_limited(config: RewardConfig) -> bool:
    return config.reward_manager.source == "register" and config.reward_manager.name == "rate_limited"


def _main_function(config: RewardConfig, data_sources: Collection[str], cpu_limited: bool) -> tuple[Callable, dict]:
    """Return the custom or built-in function and its fixed keywords."""
    custom = config.custom_reward_function
    if custom.path is not None:
        name = f"{_CUSTOM}.name={custom.name}"
        return _member(custom.path, f"{_CUSTOM}.path", custom.name, name), custom.reward_kwargs
    options = dict(custom.reward_kwargs)
    if "code" in map(built_in.scorer_of, data_sources):
        options.setdefault("memory_mb", config.sandbox_fusion.memory_limit_mb)
    built_in.prepare(data_sources, options)
    return _cpu_limited(built_in.compute_score) if cpu_limited else built_in.compute_score, options


def _cpu_limited(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        signal.setitimer(signal.ITIMER_PROF, built_in.CPU_SECONDS)
        try:
            return function(*arguments, **keywords)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    return call


def _custom_manager(config: RewardConfig) -> Callable[..., Any]:
    manager = config.reward_manager
    name = manager.module.name if manager.name in REWARD_MANAGERS else manager.name
    function = _member(str(manager.module.path), f"{_MANAGER}.module.path", name, f"{_MANAGER}.name={name}")
    if inspect.isclass(function):
        raise ConfigError(
            f"{_MANAGER}.name={name} is a class",
            fix="write a function: it is called like a reward function, with the reward function itself as the further "
            "keyword compute_score",
        )
    return function


def _member(path: str, key: str, name: str, description: str) -> Callable[..., Any]:
    """Return the function `name` of the user's file; `description` is the key and value in messages."""
    provide_verl_imports()
    module: ModuleType = load_module(path, key)
    members = vars(module)
    if name not in members:
        functions = [other for other, member in members.items() if inspect.isfunction(member)]
        functions.sort(key=lambda other: -SequenceMatcher(None, other, name).ratio())
        hint = f"the functions there: {', '.join(functions)}" if functions else "there is no function in it"
        raise ConfigError(f"{description} is not in {module.__file__}", fix=hint)
    if not callable(members[name]):
        kind = type(members[name]).__name__
        raise ConfigError(f"{description} in {module.__file__} is of type {kind}, not a function")
    return members[name]
