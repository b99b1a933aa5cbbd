"""Reward functions bound to requests: the keywords that a function takes, one call for a response or for several, and
how the scores of several functions are combined."""

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as NotDone
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.config.custom_code import EndingForks, once, own
from hybridrl.config.judge import ROUTER, TOKENIZER
from hybridrl.rewards.score import NoScore, OutOfTime, Score, ScoringRequest, combined, fault_of, to_score

REQUEST_KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_KEYWORDS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
# The judge's, which no other function gets.
JUDGE, JUDGE_KEYWORDS = "judge", (*REQUEST_KEYWORDS[1:], "prompt")
# Passed only to a function that names it: sending tokens to the scoring processes costs as much as the text.
TOKENS = "response_ids"
# verl adds these to every response's extra_info; here a response is the one turn after the prompt's.
_ROLLOUT_FACTS: dict[str, Any] = {"num_turns": 2, "rollout_reward_scores": {}}

# Coroutines that one process runs concurrently. Other functions are called one at a time.
COROUTINES = 64


@dataclass(frozen=True)
class Bound:
    """`function` with the request keywords it takes (its name of each -> ours) and fixed ones, which take precedence.

    A coroutine is cancelled after `timeout` seconds: OutOfTime; None: it ends by itself. Any other call must be ended
    from outside.
    """

    function: Callable[..., Any]
    keywords: dict[str, str]
    fixed: dict[str, Any]
    timeout: float | None

    @property
    def is_async(self) -> bool:
        """Whether a function, a partial one or a callable object is a coroutine function, whose calls may overlap."""
        inner = self.function.func if isinstance(self.function, functools.partial) else self.function
        return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)

    def __call__(self, request: ScoringRequest) -> Any:
        return self._call(_values(request))

    def call_batch(self, requests: list[ScoringRequest]) -> Any:
        """Call the function once for all requests, by the plural keywords."""
        rows = [_values(request) for request in requests]
        names = zip((*REQUEST_KEYWORDS, "prompt"), (*BATCH_KEYWORDS, "prompts"), strict=True)
        return self._call({plural: [row[name] for row in rows] for name, plural in names})

    def _call(self, values: Mapping[str, Any]) -> Any:
        named = {name: values[ours] for name, ours in self.keywords.items()} | self.fixed
        with EndingForks():
            returned = self.function(**own(named))
        if not inspect.iscoroutine(returned):
            return returned

        async def ended() -> tuple[Any, SystemExit | None]:  # a SystemExit would end the event loop
            try:
                with EndingForks():
                    return await returned, None
            except SystemExit as exited:
                return None, exited

        call = asyncio.run_coroutine_threadsafe(ended(), _event_loop())
        try:
            value, exited = call.result(self.timeout)
        except NotDone:
            if call.done():  # the function's own exception
                raise
            call.cancel()
            raise OutOfTime(f"no score within {self.timeout:g} s (reward.timeout)") from None
        if exited is not None:
            raise exited
        return value


@once
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the one event loop of the process: clients that the user's file keeps stay bound to it.

    It runs in its own thread, since the caller's may be running a loop already.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward-event-loop", daemon=True).start()
    return loop


def _values(request: ScoringRequest) -> dict[str, Any]:
    return {
        "data_source": request.data_source,
        "solution_str": request.solution,
        "ground_truth": request.ground_truth,
        "extra_info": request.extra_info | _ROLLOUT_FACTS,
        TOKENS: request.response_ids,
        "prompt": request.prompt,
    }


def bind(
    function: Callable[..., Any], fixed: dict[str, Any], timeout: float, key: str, keywords: tuple[str, ...]
) -> Bound:
    """Bind `function` to those of `keywords` that it takes; ConfigError if it cannot be called so.

    Required parameters with other names are bound by position, as in (data_source, response, ground_truth), only if at
    least two known names are in their own positions: verl's manager prime and its evaluation call so.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    bound = {name: name for name in keywords if takes_any or name in parameters}
    names, named = list(parameters), [name for name in parameters if name in keywords]
    if len(named) >= 2 and all(names.index(name) == keywords.index(name) for name in named):
        pairs = [pair for pair in zip(names, keywords, strict=False) if pair[0] not in {*named, *fixed}]
        bound |= {name: ours for name, ours in pairs if parameters[name].default is Parameter.empty}
    bound |= {TOKENS: TOKENS} if TOKENS in parameters and keywords is REQUEST_KEYWORDS else {}
    try:
        signature.bind(**dict.fromkeys(bound) | fixed)
    except TypeError as error:
        options = {name: value for name, value in fixed.items() if name not in ("compute_score", ROUTER, TOKENIZER)}
        raise ConfigError(
            f"{key}: a function{signature} cannot be called with {', '.join(keywords)} and "
            f"reward_kwargs={options} as keywords: {error}",
            fix="name its parameters like these, or give the others a default or a value in reward_kwargs",
        ) from error
    return Bound(function, bound, fixed, timeout)


@dataclass(frozen=True)
class Reward:
    """The main function, further functions by name, and weights; all are applied to every response. A judge that
    compares the responses of a group is `compared`; with `whole` the main function takes several responses too."""

    main: Bound | None
    further: dict[str, Bound]
    weights: dict[str, float]
    compared: Bound | None = None
    whole: bool = False

    @property
    def functions(self) -> list[Bound]:
        return [*self.further.values(), *([self.main] if self.main else [])]

    @property
    def takes_tokens(self) -> bool:
        """Whether a function reads the token ids of the response."""
        return any(TOKENS in function.keywords for function in self.functions)

    @property
    def _without_main(self) -> float | None:
        """Return the main score if there is no main function; None: no function scores responses."""
        return 0.0 if self.further or self.compared else None

    def score(self, request: ScoringRequest) -> Score:
        """Score one response; raises what the functions raise."""
        return self._combined(self.main(request) if self.main else self._without_main, request)

    def score_all(self, requests: list[ScoringRequest]) -> list[Score]:
        """Score responses in one call of each function that takes several; raises what the functions raise."""
        verdicts = [None] * len(requests) if self.compared is None else self.compared.call_batch(requests)
        if self.main is None or not self.whole:
            returned = [self.main(request) if self.main else self._without_main for request in requests]
        else:
            returned = list(self.main.call_batch(requests))
        if len(returned) != len(requests):
            detail = f"returned {len(returned)} scores for {len(requests)} responses"
            return [Score(None, fault="type", detail=detail)] * len(requests)
        return list(map(self._combined, returned, requests, verdicts))

    def _combined(self, returned: Any, request: ScoringRequest, verdict: Any = None) -> Score:
        if isinstance(verdict, NoScore):
            return fault_of(verdict, "a group")
        score = to_score(returned, needs_score=not self.weights or "score" in self.weights)
        further = {name: to_score(function(request)) for name, function in self.further.items()}
        further |= {} if verdict is None else {JUDGE: to_score(verdict)}
        return combined(score, further, self.weights) if further or self.weights else score
