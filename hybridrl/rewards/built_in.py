"""The scorers that come along, by `data_source`. A new one is a file in `scorers/` and a line in a table here."""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from hybridrl.config import ConfigError

# Names of data, and of modules in `scorers/`. They are loaded when rows ask for them: one of them imports sympy.
SCORERS = {
    "openai/gsm8k": "gsm8k",
    "gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "areal/math": "math",
    "math": "math_dapo",
    "math_dapo": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "countdown": "countdown",
    "multiple_choice": "multiple_choice",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "mbpp": "code",
    "openai_humaneval": "code",
    "areal/code": "code",
}
# Beginnings of names, where the whole name is not above.
FAMILIES = {"numina_": "math", "amc": "math", "aime": "math_dapo", "searchR1_": "search_qa"}
# An answer's CPU seconds, beyond which the answer is wrong; the slowest graded answer takes half a second.
CPU_SECONDS = 3

# A ground truth that each scorer can be tried on together with an empty answer.
_TRIAL_TRUTH = {"code": "pass"}


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None, **options: Any
) -> Any:
    """The score by the scorer for `data_source`, with those options that it takes; ConfigError where there is none."""
    check_data_sources([data_source])
    scorer, known = _scorer(module_of(data_source))
    return scorer(solution_str, ground_truth, **{name: value for name, value in options.items() if name in known})


def prepare(data_sources: Iterable[str], options: dict[str, Any]) -> None:
    """Load the scorers of these data; ConfigError for an option that none of them takes, or one of them refuses."""
    modules = sorted({module for name in data_sources if (module := module_of(name)) is not None})
    known = {name for module in modules for name in _scorer(module)[1]}
    if modules and (unknown := sorted(set(options) - known)):
        raise ConfigError(
            f"reward.custom_reward_function.reward_kwargs.{unknown[0]}: the built-in scorers of these data "
            f"({', '.join(modules)}) have no such option; they have {', '.join(sorted(known)) or 'none'}"
        )
    for module in modules:
        scorer, known_here = _scorer(module)
        own = {name: value for name, value in options.items() if name in known_here}
        scorer("", _TRIAL_TRUTH.get(module, ""), **own)


def check_data_sources(names: Iterable[str]) -> None:
    """Refuse rows for which no scorer is built in; to be asked only where no custom function is set."""
    unknown = sorted({str(name) for name in names if module_of(name) is None})
    if unknown:
        built_in = [*SCORERS, *(f"{beginning}*" for beginning in FAMILIES)]
        raise ConfigError(
            f"no reward is built in for data_source {', '.join(unknown)} (built in: {', '.join(built_in)}); "
            "set reward.custom_reward_function.path to a .py file with your own function"
        )


def module_of(data_source: str) -> str | None:
    """The module in `scorers/` that judges answers to rows of this data, or None."""
    families = (module for beginning, module in FAMILIES.items() if str(data_source).startswith(beginning))
    return SCORERS.get(data_source) or next(families, None)


@functools.cache
def _scorer(module: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """The function of a module in `scorers/`, and the names of its options."""
    scorer = importlib.import_module(f"hybridrl.rewards.scorers.{module}").compute_score
    return scorer, tuple(inspect.signature(scorer).parameters)[2:]
