"""Bind a user's function to requests: its signature is checked once, then it is called by keyword."""

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import TimeoutError as NotDone
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.rewards.score import OutOfTime, ScoringRequest

REQUEST_KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_KEYWORDS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
# Passed only to a function that names it: sending tokens to the scoring processes costs as much as the text.
TOKENS = "response_ids"

# verl adds these to every response's extra_info; here a response is the one turn after the prompt's.
_ROLLOUT_FACTS = {"num_turns": 2, "rollout_reward_scores": {}}


@dataclass(frozen=True)
class Bound:
    """`function` with the request keywords it takes (its name of each -> ours) and fixed ones, which take precedence.

    A coroutine is cancelled after `timeout` seconds: OutOfTime. Any other call must be ended from outside.
    """

    function: Callable[..., Any]
    keywords: dict[str, str]
    fixed: dict[str, Any]
    timeout: float

    @property
    def is_async(self) -> bool:
        """Whether it is a coroutine function, whose calls may overlap."""
        return is_async(self.function)

    def __call__(self, request: ScoringRequest) -> Any:
        return self._call(_values(request))

    def call_batch(self, requests: list[ScoringRequest]) -> Any:
        """Call the function once for all requests, by the plural keywords."""
        rows = [_values(request) for request in requests]
        names = zip(REQUEST_KEYWORDS, BATCH_KEYWORDS, strict=True)
        return self._call({plural: [row[name] for row in rows] for name, plural in names})

    def _call(self, values: Mapping[str, Any]) -> Any:
        returned = self.function(**{name: values[ours] for name, ours in self.keywords.items()} | self.fixed)
        return _run(returned, self.timeout) if inspect.iscoroutine(returned) else returned


def bind(
    function: Callable[..., Any], fixed: dict[str, Any], timeout: float, key: str, keywords: tuple[str, ...]
) -> Bound:
    """Bind `function` to those of `keywords` that it takes; ConfigError if it cannot be called so."""
    signature = inspect.signature(function)
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    bound = {name: name for name in keywords if takes_any or name in signature.parameters}
    bound |= _by_position(signature, keywords, fixed)
    bound |= {TOKENS: TOKENS} if TOKENS in signature.parameters and keywords is REQUEST_KEYWORDS else {}
    try:
        signature.bind(**dict.fromkeys(bound) | fixed)
    except TypeError as error:
        options = {name: value for name, value in fixed.items() if name != "compute_score"}
        raise ConfigError(
            f"{key}: a function{signature} cannot be called with {', '.join(keywords)} and "
            f"reward_kwargs={options} as keywords: {error}",
            fix="name its parameters like these, or give the others a default or a value in reward_kwargs",
        ) from error
    return Bound(function, bound, fixed, timeout)


def _by_position(signature: inspect.Signature, keywords: tuple[str, ...], fixed: dict[str, Any]) -> dict[str, str]:
    """Bind required parameters with other names by position, as in (data_source, response, ground_truth).

    verl's manager prime and its evaluation call so. Only if at least two known names are in their own positions.
    """
    names = list(signature.parameters)
    known = [name for name in names if name in keywords]
    if len(known) < 2 or any(names.index(name) != keywords.index(name) for name in known):
        return {}
    pairs = [pair for pair in zip(names, keywords, strict=False) if pair[0] not in {*known, *fixed}]
    return {name: ours for name, ours in pairs if signature.parameters[name].default is Parameter.empty}


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a function, a partial one or a callable object is a coroutine function."""
    inner = function.func if isinstance(function, functools.partial) else function
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def _values(request: ScoringRequest) -> dict[str, Any]:
    return {
        "data_source": request.data_source,
        "solution_str": request.solution,
        "ground_truth": request.ground_truth,
        "extra_info": request.extra_info | _ROLLOUT_FACTS,
        TOKENS: request.response_ids,
    }


def _run(coroutine: Coroutine[Any, Any, Any], timeout: float) -> Any:
    call = asyncio.run_coroutine_threadsafe(_wrap_exit(coroutine), _event_loop())
    try:
        return call.result(timeout)
    except NotDone:
        if call.done():  # the function's own exception
            raise
        call.cancel()
        raise OutOfTime(f"no score within {timeout:g} s (reward.timeout)") from None
    except _Exit as exited:
        raise exited.__cause__ from None


class _Exit(Exception):
    """A coroutine's SystemExit, which would end the event loop."""


async def _wrap_exit(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await coroutine
    except SystemExit as exited:
        raise _Exit from exited


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the one event loop of the process: clients that the user's file keeps stay bound to it.

    It runs in its own thread, since the caller's may be running a loop already.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward-event-loop", daemon=True).start()
    return loop
