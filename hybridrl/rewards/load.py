"""From the reward's configuration to one function of an answer, refused with a reason before anything starts.

Knows files, names and signatures; calls nothing of the user's but the import of the file.
"""

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine
from difflib import SequenceMatcher
from inspect import Parameter
from types import ModuleType
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.config.own_code import load_module
from hybridrl.config.schema import CustomRewardConfig, RewardConfig
from hybridrl.rewards.built_in import SCORERS, check_data_sources
from hybridrl.rewards.score import Answer, RewardFunction

_KEY = "reward.custom_reward_function"
_ANSWER_KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_reward(config: RewardConfig) -> RewardFunction:
    """The custom function where a path is set, else the built-in one for each answer's data_source.

    It raises what the user's function raises. ConfigError: what can be seen to be wrong without a call.
    """
    custom = config.custom_reward_function
    if custom.path is None:
        return _dispatcher(custom.reward_kwargs)
    return _bind(_find_function(load_module(custom.path, f"{_KEY}.path"), custom), custom.reward_kwargs)


def _dispatcher(reward_kwargs: dict[str, Any]) -> RewardFunction:
    scorers = {name: _bind(function, reward_kwargs) for name, function in SCORERS.items()}
    for scorer in scorers.values():  # an option that a scorer refuses shows on any answer
        scorer(Answer("", "", "", {}))

    def score(answer: Answer) -> Any:
        check_data_sources([answer.data_source])
        return scorers[answer.data_source](answer)

    return score


def _find_function(module: ModuleType, custom: CustomRewardConfig) -> Callable[..., Any]:
    members = vars(module)
    if custom.name not in members:
        functions = [name for name, member in members.items() if inspect.isfunction(member)]
        functions.sort(key=lambda name: -SequenceMatcher(None, name, custom.name).ratio())
        raise ConfigError(
            f"{_KEY}.name={custom.name} is not in {custom.path}; "
            + (f"the functions there: {', '.join(functions)}" if functions else "there is no function in it")
        )
    if not callable(members[custom.name]):
        kind = type(members[custom.name]).__name__
        raise ConfigError(f"{_KEY}.name={custom.name} in {custom.path} is of type {kind}, not a function")
    return members[custom.name]


def _bind(function: Callable[..., Any], reward_kwargs: dict[str, Any]) -> RewardFunction:
    """A function of an answer that hands on, by keyword, what `function` takes; `reward_kwargs` win."""
    signature = inspect.signature(function)
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    taken = [name for name in _ANSWER_KEYWORDS if takes_any or name in signature.parameters]
    try:
        signature.bind(**dict.fromkeys(taken) | reward_kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{_KEY}: a function{signature} cannot be called with {', '.join(_ANSWER_KEYWORDS)} and "
            f"reward_kwargs={reward_kwargs} as keywords: {error}; name its parameters like these, "
            "or give the others a default or a value in reward_kwargs"
        ) from error

    def call(answer: Answer) -> Any:
        values = {
            "data_source": answer.data_source,
            "solution_str": answer.solution,
            "ground_truth": answer.ground_truth,
            "extra_info": answer.extra_info,
        }
        returned = function(**{name: values[name] for name in taken} | reward_kwargs)
        return _finish(returned) if inspect.iscoroutine(returned) else returned

    return call


def _finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(coroutine, _event_loop()).result()


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop for the process's whole life: clients that the user's file keeps stay bound to it.

    In a thread of its own, since the caller's may be running a loop already.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward-event-loop", daemon=True).start()
    return loop
