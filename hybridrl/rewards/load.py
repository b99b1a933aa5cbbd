"""From the reward's configuration to scores of answers, refused with a reason before anything starts.

Knows files, names and managers; calls nothing of the user's but the import of the file.
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
from hybridrl.config.schema_reward import RewardConfig
from hybridrl.config.values import REWARD_MANAGERS
from hybridrl.rewards import built_in
from hybridrl.rewards.binding import ANSWER_KEYWORDS, BATCH_KEYWORDS, Bound, bind
from hybridrl.rewards.managers import in_one_call
from hybridrl.rewards.score import Answer, Score, combined, to_score
from hybridrl.rewards.verl_names import answer_verl_imports

_CUSTOM = "reward.custom_reward_function"
_MANAGER = "reward.reward_manager"


@dataclass(frozen=True)
class Reward:
    """All that the configuration makes of an answer: the main function, further ones by name, and weights."""

    main: Bound | None
    further: dict[str, Bound]
    weights: dict[str, float]

    @property
    def waits(self) -> bool:
        """Whether calls may overlap: some of it is a coroutine function."""
        return any(function.waits for function in self._functions())

    @property
    def takes_tokens(self) -> bool:
        return any("response_ids" in function.taken for function in self._functions())

    def score(self, answer: Answer) -> Score:
        """Raises what the functions raise."""
        return self._combined(self.main(answer) if self.main else 0.0, answer)

    def score_all(self, answers: list[Answer]) -> list[Score]:
        """The scores of one call of the main function; raises what the functions raise."""
        assert self.main is not None
        returned = list(self.main.of_all(answers))
        if len(returned) != len(answers):
            detail = f"returned {len(returned)} scores for {len(answers)} answers"
            return [Score(None, fault="type", detail=detail)] * len(answers)
        return [self._combined(value, answer) for value, answer in zip(returned, answers, strict=True)]

    def _combined(self, returned: Any, answer: Answer) -> Score:
        score = to_score(returned, needs_score=not self.weights or "score" in self.weights)
        if not self.further and not self.weights:
            return score
        return combined(score, {name: to_score(part(answer)) for name, part in self.further.items()}, self.weights)

    def _functions(self) -> list[Bound]:
        return [*self.further.values(), *([self.main] if self.main else [])]


def load_reward(config: RewardConfig, data_sources: Collection[str] = (), *, cpu_limited: bool = False) -> Reward:
    """The custom function where a path is set, else the built-in one for each answer's data_source.

    `data_sources` are those of the rows, whose scorers are loaded now. `cpu_limited`: the kernel ends this process
    (SIGPROF) where a built-in scorer needs more than `built_in.CPU_SECONDS` for an answer.
    """
    further = {
        name: bind(own_function(str(path), f"reward.functions.{name}"), {}, config.timeout, name, ANSWER_KEYWORDS)
        for name, path in config.functions.items()
    }
    main = _main(config, data_sources, cpu_limited) if uses_main(config) else None
    return Reward(main, further, config.weights)


def uses_main(config: RewardConfig) -> bool:
    """Whether the custom or built-in function is called: not where only further ones have a weight."""
    return not config.weights or not set(config.weights) <= set(config.functions)


def uses_built_in(config: RewardConfig) -> bool:
    return uses_main(config) and config.custom_reward_function.path is None


def own_function(name: str, key: str) -> Callable[..., Any]:
    """The function at `path/to/file.py:function`; without the colon the one that is called compute_score."""
    path, colon, function = name.rpartition(":")
    path, function = (path, function) if colon and not function.startswith("//") else (name, "compute_score")
    return _find(_module(path, key), function, f"{key}={name}")


def _main(config: RewardConfig, data_sources: Collection[str], cpu_limited: bool) -> Bound:
    function, fixed = _function(config, data_sources, cpu_limited)
    if config.reward_manager.source == "importlib":
        function, fixed = _own_manager(config), {"compute_score": functools.partial(function, **fixed)}
    keywords = BATCH_KEYWORDS if in_one_call(config) else ANSWER_KEYWORDS
    return bind(function, fixed, config.timeout, _CUSTOM, keywords)


def _function(config: RewardConfig, data_sources: Collection[str], cpu_limited: bool) -> tuple[Callable, dict]:
    """The custom function or the built-in one, and its fixed keywords."""
    custom = config.custom_reward_function
    if custom.path is not None:
        module = _module(custom.path, f"{_CUSTOM}.path")
        return _find(module, custom.name, f"{_CUSTOM}.name={custom.name}"), custom.reward_kwargs
    options = dict(custom.reward_kwargs)
    if "code" in map(built_in.module_of, data_sources):
        options.setdefault("memory_mb", config.sandbox_fusion.memory_limit_mb)
    built_in.prepare(data_sources, options)
    return _limited(built_in.compute_score) if cpu_limited else built_in.compute_score, options


def _limited(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        signal.setitimer(signal.ITIMER_PROF, built_in.CPU_SECONDS)
        try:
            return function(*arguments, **named)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    return call


def _own_manager(config: RewardConfig) -> Callable[..., Any]:
    manager = config.reward_manager
    name = manager.module.name if manager.name in REWARD_MANAGERS else manager.name
    found = _find(_module(str(manager.module.path), f"{_MANAGER}.module.path"), name, f"{_MANAGER}.name={name}")
    if inspect.isclass(found):
        raise ConfigError(
            f"{_MANAGER}.name={name} is a class; a manager here is a function that is called like a reward function, "
            "with the reward function itself as the further keyword compute_score"
        )
    return found


def _module(path: str, key: str) -> ModuleType:
    answer_verl_imports()
    return load_module(path, key)


def _find(module: ModuleType, name: str, told: str) -> Callable[..., Any]:
    members = vars(module)
    if name not in members:
        functions = [other for other, member in members.items() if inspect.isfunction(member)]
        functions.sort(key=lambda other: -SequenceMatcher(None, other, name).ratio())
        raise ConfigError(
            f"{told} is not in {module.__file__}; "
            + (f"the functions there: {', '.join(functions)}" if functions else "there is no function in it")
        )
    if not callable(members[name]):
        raise ConfigError(f"{told} in {module.__file__} is of type {type(members[name]).__name__}, not a function")
    return members[name]
