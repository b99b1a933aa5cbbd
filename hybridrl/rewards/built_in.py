"""Built-in scorers by `data_source`. A new one is a function in `scorers/` and a line in the tables here."""

import functools
import importlib
import inspect
import signal
from collections.abc import Callable, Iterable
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.rewards.score import WRITTEN

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

# A ground truth on which a scorer can be tried with an empty response, if not an empty text.
_TRIAL_TRUTH = {"code": "pass"}


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None, **options: Any
) -> Any:
    """Score by the scorer of `data_source`, with those options that it takes; ConfigError if there is none. Of a
    conversation only what the policy wrote is scored: a tool may have said the truth."""
    name = scorer_of(data_source)
    if name is None:
        check_data_sources([data_source])
    scorer, taken = _load(name)
    text = (extra_info or {}).get(WRITTEN, solution_str)
    return scorer(text, ground_truth, **{name: value for name, value in options.items() if name in taken})


def cpu_limited_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None, **options: Any
) -> Any:
    """`compute_score`; the kernel ends this process (SIGPROF) when it needs more than CPU_SECONDS."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        return compute_score(data_source, solution_str, ground_truth, extra_info, **options)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def prepare(data_sources: Iterable[str], options: dict[str, Any]) -> None:
    """Load the scorers of these data; ConfigError for an option that none of them takes, or that one rejects."""
    names = sorted({scorer for source in data_sources if (scorer := scorer_of(source)) is not None})
    known = {option for name in names for option in _load(name)[1]}
    if names and (unknown := sorted(set(options) - known)):
        raise ConfigError(
            f"reward.custom_reward_function.reward_kwargs.{unknown[0]}: the built-in scorers of these data "
            f"({', '.join(names)}) have no such option",
            fix=f"they have {', '.join(sorted(known)) or 'none'}",
        )
    for name in names:
        scorer, taken = _load(name)
        scorer("", _TRIAL_TRUTH.get(name, ""), **{name: value for name, value in options.items() if name in taken})


def check_data_sources(names: Iterable[str]) -> None:
    """Raise ConfigError for rows without a built-in scorer; to be called only if no custom function is set."""
    unknown = sorted({str(name) for name in names if scorer_of(name) is None})
    if unknown:
        built_in = [*SCORERS, *(f"{beginning}*" for beginning in FAMILIES)]
        raise ConfigError(
            f"no reward is built in for data_source {', '.join(unknown)} (built in: {', '.join(built_in)})",
            fix="set reward.custom_reward_function.path to a .py file with a custom function",
        )


@functools.cache
def scorer_of(data_source: str) -> str | None:
    """Return the name of the scorer for rows of this data, or None."""
    families = (scorer for beginning, scorer in FAMILIES.items() if str(data_source).startswith(beginning))
    return SCORERS.get(data_source) or next(families, None)


@functools.cache
def _load(scorer: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Return the function of a scorer, and the names of its options."""
    file, _, name = _FUNCTIONS[scorer].partition(":")
    function = vars(importlib.import_module(f"hybridrl.rewards.scorers.{file}"))[name]
    return function, tuple(inspect.signature(function).parameters)[2:]
