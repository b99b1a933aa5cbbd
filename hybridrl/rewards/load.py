"""Turn the reward configuration into a function from requests to scores, rejecting what cannot work before a run.

Nothing of the user's is called here except the import of the file: a function's signature is checked once, and then it
is called by keyword. verl's reward managers come down to how it is called: naive, prime, remote and gdpo are the same
here, since every function runs in processes with a time limit.

A new built-in scorer is a function in `scorers/`, a line in the tables here and a name in `config.schema_parts.Scorer`.
"""

import asyncio
import functools
import importlib
import inspect
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import TimeoutError as NotDone
from dataclasses import dataclass
from difflib import SequenceMatcher
from inspect import Parameter
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.config.custom_code import EndingForks, load_module, once, own
from hybridrl.config.schema_parts import NO_SOURCE, RewardConfig
from hybridrl.config.values import REWARD_MANAGERS
from hybridrl.plugins import load as plugin
from hybridrl.plugins import names
from hybridrl.rewards.score import WRITTEN, OutOfTime, Score, ScoringRequest, combined, to_score

# The function of each scorer; its file is imported when rows need it, since one of them imports sympy.
_FUNCTIONS = {
    "gsm8k": "short_answers:score_gsm8k",
    "countdown": "short_answers:score_countdown",
    "multiple_choice": "short_answers:score_multiple_choice",
    "search_qa": "short_answers:score_search_qa",
    "math": "math:compute_score",
    "math_dapo": "math:compute_dapo_score",
    "code": "code:compute_score",
}
# The data sources of each scorer.
_SOURCES = {
    "gsm8k": ["openai/gsm8k", "gsm8k"],
    "math": ["lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "areal/math"],
    "math_dapo": ["math", "math_dapo", "math_dapo_reasoning"],
    "countdown": ["countdown"],
    "multiple_choice": ["multiple_choice"],
    "code": ["codecontests", "apps", "codeforces", "taco", "mbpp", "openai_humaneval", "areal/code"],
}
SCORERS = {source: scorer for scorer, sources in _SOURCES.items() for source in sources}
# Scorers by the beginning of a data source that is not above.
FAMILIES = {"numina_": "math", "amc": "math", "aime": "math_dapo", "searchR1_": "search_qa"}
# CPU seconds per response, beyond which it counts as wrong; the slowest correct response takes half a second.
CPU_SECONDS = 3
_SCORING = threading.Lock()  # the timer is the process's: one response at a time, also next to a judge's calls

# A ground truth on which a scorer can be tried with an empty response, if not an empty text.
_TRIAL_TRUTH = {"code": "pass"}


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    named: str | None = None,
    optional: bool = False,
    **options: Any,
) -> Any:
    """Score by the `named` scorer or that of `data_source`, with its options; ConfigError if there is none, or None if
    it is `optional`. Of a conversation only what the policy wrote is scored: a tool may have said the truth."""
    name = scorer_of(data_source, named)
    if name is None:
        if optional:
            return None
        check_data_sources([data_source])
    scorer, taken = _load(name)
    text = (extra_info or {}).get(WRITTEN, solution_str)
    return scorer(text, ground_truth, **{name: value for name, value in options.items() if name in taken})


def cpu_limited_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None, **options: Any
) -> Any:
    """`compute_score`; the kernel ends this process (SIGPROF) when it needs more than CPU_SECONDS."""
    with _SCORING:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            return compute_score(data_source, solution_str, ground_truth, extra_info, **options)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def _prepare(names: list[str], options: dict[str, Any]) -> None:
    """Load these scorers; ConfigError for an option unknown to all of them, or rejected by one."""
    allowed = {option for name in names for option in _load(name)[1]}
    if names and (unknown := sorted(set(options) - allowed)):
        raise ConfigError(
            f"reward.custom_reward_function.reward_kwargs.{unknown[0]}: the built-in scorers of these data "
            f"({', '.join(names)}) have no such option",
            fix=f"they have {', '.join(sorted(allowed)) or 'none'}",
        )
    for name in names:
        scorer, taken = _load(name)
        scorer("", _TRIAL_TRUTH.get(name, ""), **{name: value for name, value in options.items() if name in taken})


def check_data_sources(names: Iterable[str], named: str | None = None) -> None:
    """Raise ConfigError for rows without a built-in scorer, none being `named` for all; to be called only if no custom
    function is set."""
    unknown = sorted({str(name) for name in names if scorer_of(name, named) is None})
    if unknown:
        built_in = [*SCORERS, *(f"{beginning}*" for beginning in FAMILIES)]
        cause = f"no reward is built in for data_source {', '.join(unknown)} (built in: {', '.join(built_in)})"
        if {*unknown} <= {NO_SOURCE, ""}:
            cause = "the rows have no data source (the column data.reward_fn_key), which selects a built-in reward"
        fix = f"set reward.name to one of {', '.join(_FUNCTIONS)} for all rows, or reward.custom_reward_function.path "
        raise ConfigError(cause, fix=f"{fix}to a .py file with a custom function")


@functools.cache
def scorer_of(data_source: str, named: str | None = None) -> str | None:
    """Return the name of the scorer for rows of this data, or None; `named` is one for all rows (reward.name)."""
    families = (scorer for beginning, scorer in FAMILIES.items() if str(data_source).startswith(beginning))
    return named or SCORERS.get(data_source) or next(families, None)


@functools.cache
def _load(scorer: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Return the function of a scorer, and the names of its options."""
    file, _, name = _FUNCTIONS[scorer].partition(":")
    function = vars(importlib.import_module(f"hybridrl.rewards.scorers.{file}"))[name]
    return function, tuple(inspect.signature(function).parameters)[2:]


REQUEST_KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_KEYWORDS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
# The judge's, which no other function gets.
JUDGE, JUDGE_KEYWORDS = "judge", (*REQUEST_KEYWORDS[1:], "prompt")
# Passed only to a function that names it: sending tokens to the scoring processes costs as much as the text.
TOKENS = "response_ids"
# verl adds these to every response's extra_info; here a response is the one turn after the prompt's.
_ROLLOUT_FACTS: dict[str, Any] = {"num_turns": 2, "rollout_reward_scores": {}}

_CUSTOM = "reward.custom_reward_function"
_MANAGER = "reward.reward_manager"
# Coroutines that one process runs concurrently. Other functions are called one at a time.
COROUTINES = 64


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
        """Whether a function, a partial one or a callable object is a coroutine function, whose calls may overlap."""
        inner = self.function.func if isinstance(self.function, functools.partial) else self.function
        return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)

    def __call__(self, request: ScoringRequest) -> Any:
        return self._call(_values(request))

    def call_batch(self, requests: list[ScoringRequest]) -> Any:
        """Call the function once for all requests, by the plural keywords."""
        rows = [_values(request) for request in requests]
        names = zip(REQUEST_KEYWORDS, BATCH_KEYWORDS, strict=True)
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


def _bind(
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
        options = {name: value for name, value in fixed.items() if name != "compute_score"}
        raise ConfigError(
            f"{key}: a function{signature} cannot be called with {', '.join(keywords)} and "
            f"reward_kwargs={options} as keywords: {error}",
            fix="name its parameters like these, or give the others a default or a value in reward_kwargs",
        ) from error
    return Bound(function, bound, fixed, timeout)


@dataclass(frozen=True)
class Reward:
    """The main function, further functions by name, and weights; all are applied to every response."""

    main: Bound | None
    further: dict[str, Bound]
    weights: dict[str, float]

    @property
    def functions(self) -> list[Bound]:
        return [*self.further.values(), *([self.main] if self.main else [])]

    @property
    def takes_tokens(self) -> bool:
        """Whether a function reads the token ids of the response."""
        return any(TOKENS in function.keywords for function in self.functions)

    def score(self, request: ScoringRequest) -> Score:
        """Score one response; raises what the functions raise."""
        return self._combined(self.main(request) if self.main else 0.0 if self.further else None, request)

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


def load_reward(config: RewardConfig, data_sources: Collection[str] = (), *, cpu_limited: bool = False) -> Reward:
    """Load the custom function if a path is set, else the built-in scorers of `data_sources`.

    `cpu_limited`: the kernel ends this process (SIGPROF) when a built-in scorer needs more than CPU_SECONDS for one
    response.
    """
    further = {}
    for key, place in config.functions.items():
        path, colon, name = str(place).rpartition(":")  # path/to/file.py:function, or a file alone
        path, name = (path, name) if colon and not name.startswith("//") else (str(place), "compute_score")
        function = _member(path, f"reward.functions.{key}", name, f"reward.functions.{key}={place}")
        further[key] = _bind(function, {}, config.timeout, key, REQUEST_KEYWORDS)
    if config.judge.base_url:  # its file imports a client of HTTP, which takes as long as all others together
        judge = importlib.import_module("hybridrl.rewards.judge").Judge(config.judge)
        further[JUDGE] = Bound(judge, {name: name for name in JUDGE_KEYWORDS}, {}, config.timeout)
    if not uses_main(config):
        return Reward(None, further, config.weights)

    custom, manager = config.custom_reward_function, config.reward_manager
    fixed = dict(custom.reward_kwargs)
    if custom.path is not None:
        function = _member(custom.path, f"{_CUSTOM}.path", str(custom.name), f"{_CUSTOM}.name={custom.name}")
    else:
        scorers = {config.name} if config.name else {*map(scorer_of, data_sources)}
        if "code" in scorers:
            fixed.setdefault("memory_mb", config.sandbox_fusion.memory_limit_mb)
        _prepare(sorted(filter(None, scorers)), fixed)
        function = cpu_limited_score if cpu_limited else compute_score
        function = functools.partial(function, named=config.name, optional=JUDGE in further)
    added = manager.source != "importlib" and manager.name in names("reward_manager")
    if added or manager.source == "importlib":
        fixed, name = {"compute_score": functools.partial(function, **fixed)}, manager.name
        if added:
            function = plugin(f"reward_manager.{name}")
        else:
            name = manager.module.name if name in REWARD_MANAGERS else name
            function = _member(str(manager.module.path), f"{_MANAGER}.module.path", name, f"{_MANAGER}.name={name}")
        if inspect.isclass(function):
            fix = "write a function: it is called like a reward function, with the reward function itself as the "
            raise ConfigError(f"{_MANAGER}.name={name} is a class", fix=f"{fix}further keyword compute_score")
    keywords = BATCH_KEYWORDS if in_one_call(config) else REQUEST_KEYWORDS
    return Reward(_bind(function, fixed, config.timeout, _CUSTOM, keywords), further, config.weights)


def uses_main(config: RewardConfig) -> bool:
    """Whether the custom or built-in function is called: not if only further functions have a weight. Next to a reward
    model it is called if it is named."""
    if config.reward_model.enable and not config.weights:
        return any((config.name, config.custom_reward_function.path, config.reward_manager.module.path))
    judged = {JUDGE} if config.judge.base_url else set()
    return not config.weights or not set(config.weights) <= set(config.functions) | judged


def uses_built_in(config: RewardConfig) -> bool:
    """Whether the built-in scorers decide: with a judge, rows need none of them."""
    return uses_main(config) and config.custom_reward_function.path is None and not config.judge.base_url


def in_one_call(config: RewardConfig) -> bool:
    """Whether the function takes all responses of a step in one call (verl's manager "batch")."""
    return config.reward_manager.source == "register" and config.reward_manager.name == "batch"


def _is_limited(config: RewardConfig, *, is_set: bool) -> bool:
    """Whether a limit on calls applies: with a judge one that `is_set`, whatever the manager."""
    by_manager = config.reward_manager.source == "register" and config.reward_manager.name == "rate_limited"
    return by_manager or bool(config.judge.base_url and is_set)


def processes(config: RewardConfig) -> int:
    """Return how many scoring processes can be used; 0: none is wanted."""
    limited = _is_limited(config, is_set=config.max_concurrent > 1)
    most = 1 if in_one_call(config) else config.max_concurrent if limited else config.num_workers
    return min(config.num_workers, most)


def calls_at_once(config: RewardConfig, is_async: bool) -> int:
    """Return the concurrent calls per process."""
    if _is_limited(config, is_set=config.max_concurrent > 1):
        return max(config.max_concurrent // max(processes(config), 1), 1)
    return COROUTINES if is_async else 1


def seconds_between_calls(config: RewardConfig) -> float:
    """Return the seconds between calls of each process with which all together keep the limits of `rate_limited`."""
    if not _is_limited(config, is_set=True):
        return 0.0
    by_tokens = config.max_tpm / config.estimated_tokens_per_request if config.max_tpm else None
    rates = [rate for rate in (config.max_rpm, by_tokens) if rate]
    return max(processes(config), 1) * 60 / min(rates) if rates else 0.0


def _member(path: str, key: str, name: str, description: str) -> Callable[..., Any]:
    """Return the function `name` of the user's file; `description` is the key and value in messages."""
    plugin("imports")()
    module = load_module(path, key)
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
