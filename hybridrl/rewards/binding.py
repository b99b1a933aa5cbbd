"""A user's function as one of an answer, or of a list of answers: checked by its signature, called by keyword."""

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.rewards.score import Answer, OutOfTime

ANSWER_KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_KEYWORDS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
# Handed on only to a function that names it: sending tokens to the scoring processes costs as much as the text.
TOKENS = "response_ids"

# verl tells these of every answer; here an answer is one turn after the prompt's.
_ROLLOUT_FACTS = {"num_turns": 2, "rollout_reward_scores": {}}


@dataclass(frozen=True)
class Bound:
    """`function` with the keywords that it takes of an answer (its name for each -> ours), and fixed ones, which win.

    A coroutine is given up after `timeout` seconds: OutOfTime. Any other call must be ended from outside.
    """

    function: Callable[..., Any]
    taken: dict[str, str]
    fixed: dict[str, Any]
    timeout: float

    @property
    def waits(self) -> bool:
        """Whether it is a coroutine function, whose calls may overlap."""
        return is_async(self.function)

    def __call__(self, answer: Answer) -> Any:
        return self._call(_values(answer))

    def of_all(self, answers: list[Answer]) -> Any:
        """One call for all answers, by the plural keywords."""
        rows = [_values(answer) for answer in answers]
        columns = {
            plural: [row[name] for row in rows] for name, plural in zip(ANSWER_KEYWORDS, BATCH_KEYWORDS, strict=True)
        }
        return self._call(columns)

    def _call(self, values: Mapping[str, Any]) -> Any:
        returned = self.function(**{name: values[ours] for name, ours in self.taken.items()} | self.fixed)
        return _finish(returned, self.timeout) if inspect.iscoroutine(returned) else returned


def bind(
    function: Callable[..., Any], fixed: dict[str, Any], timeout: float, key: str, keywords: tuple[str, ...]
) -> Bound:
    """`function` bound to those of `keywords` that it takes; ConfigError where it cannot be called so."""
    signature = inspect.signature(function)
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    taken = {name: name for name in keywords if takes_any or name in signature.parameters}
    taken |= _by_place(signature, keywords, fixed)
    taken |= {TOKENS: TOKENS} if TOKENS in signature.parameters and keywords is ANSWER_KEYWORDS else {}
    try:
        signature.bind(**dict.fromkeys(taken) | fixed)
    except TypeError as error:
        options = {name: value for name, value in fixed.items() if name != "compute_score"}
        raise ConfigError(
            f"{key}: a function{signature} cannot be called with {', '.join(keywords)} and "
            f"reward_kwargs={options} as keywords: {error}; name its parameters like these, "
            "or give the others a default or a value in reward_kwargs"
        ) from error
    return Bound(function, taken, fixed, timeout)


def _by_place(signature: inspect.Signature, keywords: tuple[str, ...], fixed: dict[str, Any]) -> dict[str, str]:
    """Required parameters under other names, as in (data_source, response, ground_truth): verl's manager prime and its
    evaluation call by position. Only where the known names, two or more, stand in their own places."""
    names = list(signature.parameters)
    known = [name for name in names if name in keywords]
    if len(known) < 2 or any(names.index(name) != keywords.index(name) for name in known):
        return {}
    pairs = [pair for pair in zip(names, keywords, strict=False) if pair[0] not in {*known, *fixed}]
    return {name: ours for name, ours in pairs if signature.parameters[name].default is Parameter.empty}


def is_async(function: Callable[..., Any]) -> bool:
    inner = function.func if isinstance(function, functools.partial) else function
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def _values(answer: Answer) -> dict[str, Any]:
    return {
        "data_source": answer.data_source,
        "solution_str": answer.solution,
        "ground_truth": answer.ground_truth,
        "extra_info": answer.extra_info | _ROLLOUT_FACTS,
        TOKENS: answer.response_ids,
    }


def _finish(coroutine: Coroutine[Any, Any, Any], timeout: float) -> Any:
    call = asyncio.run_coroutine_threadsafe(_keep_exit(coroutine), _event_loop())
    try:
        return call.result(timeout)
    except NotYet:
        if call.done():  # the function's own exception
            raise
        call.cancel()
        raise OutOfTime(f"no score within {timeout:g} s (reward.timeout)") from None
    except _Exit as exited:
        raise exited.__cause__ from None


class _Exit(Exception):
    """A coroutine's SystemExit, which would end the event loop."""


async def _keep_exit(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await coroutine
    except SystemExit as exited:
        raise _Exit from exited


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop for the process's whole life: clients that the user's file keeps stay bound to it.

    In a thread of its own, since the caller's may be running a loop already.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward-event-loop", daemon=True).start()
    return loop
