"""Turn the reward configuration into a function from requests to scores, rejecting what cannot work before a run.

Nothing of the user's is called here except the import of the file: a function's signature is checked once, and then it
is called by keyword. verl's reward managers come down to how it is called: naive, prime, remote and gdpo are the same
here, since every function runs in processes with a time limit.

A new built-in scorer is a function in `scorers/`, a line in the tables here and a name in `config.schema_parts.Scorer`.
"""

import functools
import importlib
import inspect
import signal
import threading
from collections.abc import Callable, Collection, Iterable
from difflib import SequenceMatcher
from typing import Any, Literal
from urllib.parse import urlsplit

from hybridrl.config import ConfigError
from hybridrl.config.custom_code import load_module
from hybridrl.config.judge import ROUTER, TOKENIZER
from hybridrl.config.schema_parts import NO_SOURCE, RewardConfig
from hybridrl.config.values import REWARD_MANAGERS
from hybridrl.plugins import load as plugin
from hybridrl.plugins import names
from hybridrl.rewards.functions import (
    BATCH_KEYWORDS,
    COROUTINES,
    JUDGE,
    JUDGE_KEYWORDS,
    REQUEST_KEYWORDS,
    Bound,
    Reward,
    bind,
)
from hybridrl.rewards.score import WRITTEN

# The function of each scorer; its file is imported when rows need it, since one of them imports sympy.
_FUNCTIONS = {
    "gsm8k": "short_answers:score_gsm8k",
    "countdown": "short_answers:score_countdown",
    "multiple_choice": "short_answers:score_multiple_choice",
    "search_qa": "short_answers:score_search_qa",
    "math": "math:compute_score",
    "math_dapo": "math:compute_dapo_score",
    "geo3k": "math:compute_geometry_score",
    "code": "code:compute_score",
    "none": "short_answers:score_nothing",
}
# The data sources of each scorer.
_SOURCES = {
    "gsm8k": ["openai/gsm8k", "gsm8k"],
    "math": ["lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "areal/math"],
    "math_dapo": ["math", "math_dapo", "math_dapo_reasoning"],
    "geo3k": ["hiyouga/geometry3k"],
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
    """Return the name of the scorer for rows of this data, or None; `named` is one for all rows (reward.name), or
    "none" for those without another."""
    families = (scorer for beginning, scorer in FAMILIES.items() if str(data_source).startswith(beginning))
    by_source = SCORERS.get(data_source) or next(families, None)
    return by_source or named if named == "none" else named or by_source


@functools.cache
def _load(scorer: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Return the function of a scorer, and the names of its options."""
    file, _, name = _FUNCTIONS[scorer].partition(":")
    function = vars(importlib.import_module(f"hybridrl.rewards.scorers.{file}"))[name]
    return function, tuple(inspect.signature(function).parameters)[2:]


_CUSTOM = "reward.custom_reward_function"
_MANAGER = "reward.reward_manager"


def load_reward(
    config: RewardConfig,
    data_sources: Collection[str] = (),
    *,
    cpu_limited: bool = False,
    started: Callable[[], None] = lambda: None,
) -> Reward:
    """Load the custom function if a path is set, else the built-in scorers of `data_sources`.

    `cpu_limited`: the kernel ends this process (SIGPROF) when a built-in scorer needs more than CPU_SECONDS for one
    response. `started` is called before each request to a judge.
    """
    further, compared = {}, None
    for key, place in config.functions.items():
        path, colon, name = str(place).rpartition(":")  # path/to/file.py:function, or a file alone
        path, name = (path, name) if colon and not name.startswith("//") else (str(place), "compute_score")
        function = _member(path, f"reward.functions.{key}", name, f"reward.functions.{key}={place}")
        further[key] = bind(function, {}, config.timeout, key, REQUEST_KEYWORDS)
    if config.judged:  # its file imports a client of HTTP, which takes as long as all others together
        at_once, seconds = requests_at_once(config), seconds_between_requests(config)
        limits = {"at_once": at_once, "seconds": seconds, "started": started}
        judge = importlib.import_module("hybridrl.rewards.judge").Judge(config.judge, **limits)
        timeout = None if at_once or seconds else config.timeout  # waits before a request do not count
        if config.judge.compares:
            keywords = {name: name for name in ("solution_strs", "extra_infos", "prompts")}
            compared = Bound(judge.compare, keywords, {}, timeout)
        else:
            further[JUDGE] = Bound(judge, {name: name for name in JUDGE_KEYWORDS}, {}, timeout)
    if not uses_main(config):
        return Reward(None, further, config.weights, compared)

    custom, manager = config.custom_reward_function, config.reward_manager
    fixed = dict(custom.reward_kwargs)
    if custom.path is not None:
        function = _member(custom.path, f"{_CUSTOM}.path", str(custom.name), f"{_CUSTOM}.name={custom.name}")
        fixed = _server_values(config) | fixed
    else:
        scorers = {scorer_of(source, config.name) for source in data_sources or [NO_SOURCE]}
        if "code" in scorers:
            fixed.setdefault("memory_mb", config.sandbox_fusion.memory_limit_mb)
        _prepare(sorted(filter(None, scorers)), fixed)
        function = cpu_limited_score if cpu_limited else compute_score
        function = functools.partial(function, named=config.name, optional=config.judged)
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
    whole = in_one_call(config) and custom.path is not None
    keywords = BATCH_KEYWORDS if whole else REQUEST_KEYWORDS
    main = bind(function, fixed, config.timeout, _CUSTOM, keywords)
    return Reward(main, further, config.weights, compared, whole=whole)


def uses_main(config: RewardConfig) -> bool:
    """Whether the custom or built-in function is called: not if only further functions have a weight. Next to a reward
    model it is called if it is named."""
    if config.reward_model.enable and not config.weights:
        return any((config.name, config.custom_reward_function.path, config.reward_manager.module.path))
    judged = {JUDGE} if config.judged else set()
    return not config.weights or not set(config.weights) <= set(config.functions) | judged


def uses_built_in(config: RewardConfig) -> bool:
    """Whether the built-in scorers decide: with a judge, rows need none of them."""
    return uses_main(config) and config.custom_reward_function.path is None and not config.judged


def unit_of(config: RewardConfig) -> Literal["response", "group", "step"]:
    """Return what a function takes in one call: a response, or with the manager group the responses to a prompt, or
    with verl's manager batch those of a step."""
    units: dict[str, Literal["group", "step"]] = {"group": "group", "batch": "step"}
    manager = config.reward_manager
    return units.get(manager.name, "response") if manager.source == "register" else "response"


def in_one_call(config: RewardConfig) -> bool:
    """Whether the function takes several responses in one call."""
    return unit_of(config) != "response"


def _by_manager(config: RewardConfig) -> bool:
    return config.reward_manager.source == "register" and config.reward_manager.name == "rate_limited"


def _is_limited(config: RewardConfig, *, is_set: bool) -> bool:
    """Whether a limit applies: with a judge one that `is_set`, whatever the manager."""
    return _by_manager(config) or bool(config.judge.base_url and is_set)


def processes(config: RewardConfig) -> int:
    """Return how many scoring processes can be used; 0: none is wanted."""
    limited = _is_limited(config, is_set=config.max_concurrent > 1)
    most = 1 if unit_of(config) == "step" else config.max_concurrent if limited else config.num_workers
    return min(config.num_workers, most)


def requests_at_once(config: RewardConfig) -> int | None:
    """Return the concurrent requests to a model's server per process; None: any number."""
    if not _is_limited(config, is_set=config.max_concurrent > 1):
        return None
    return max(config.max_concurrent // max(processes(config), 1), 1)


def seconds_between_requests(config: RewardConfig) -> float:
    """Return the seconds between requests of each process with which all together keep the limits."""
    if not _is_limited(config, is_set=True):
        return 0.0
    by_tokens = config.max_tpm / config.estimated_tokens_per_request if config.max_tpm else None
    rates = [rate for rate in (config.max_rpm, by_tokens) if rate]
    return max(processes(config), 1) * 60 / min(rates) if rates else 0.0


def calls_at_once(config: RewardConfig, is_async: bool) -> int:
    """Return the concurrent calls of functions per process. A judge limits its own requests, which are several per
    call with a rubric."""
    limit = None if config.judged and not _by_manager(config) else requests_at_once(config)
    return limit or (COROUTINES if is_async else 1)


def seconds_between_calls(config: RewardConfig) -> float:
    """Return the seconds between calls of functions of each process."""
    return 0.0 if config.judged and not _by_manager(config) else seconds_between_requests(config)


def _server_values(config: RewardConfig) -> dict[str, Any]:
    """Return the address of the model's server and its tokenizer, if the custom function names them."""
    names, values = config.server_parameters, dict[str, Any]()
    if ROUTER in names and config.judge.base_url:
        url = urlsplit(config.judge.base_url)
        host = f"[{url.hostname}]" if ":" in str(url.hostname) else url.hostname
        values[ROUTER] = f"{host}:{url.port or (443 if url.scheme == 'https' else 80)}"
    if TOKENIZER in names and config.reward_model.model_path:
        load_tokenizer = importlib.import_module("hybridrl.data.tokenizer").load_tokenizer
        values[TOKENIZER] = load_tokenizer(config.reward_model.model_path, model_key="reward.reward_model.model_path")
    return values


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
