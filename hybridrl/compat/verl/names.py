"""Let custom files `import verl...`: replacements for verl's graders and helpers if verl itself is not installed.

The graders are in `graders.py`; decorators, and classes to inherit from or to annotate with, are here. What
files of tools import is added by `stand_ins.py`.
"""

import asyncio
import functools
import importlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from hybridrl.agents.environments.user_code import UserCodeError, contained
from hybridrl.compat.verl import graders
from hybridrl.config.custom_code import once
from hybridrl.rewards.scorers.short_answers import last_tagged, normalised, thinks_then_boxes

logger = logging.getLogger(__name__)

_SCORE = "verl.utils.reward_score"


def unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function itself."""
    return function


def leaves_unchanged(*_: Any, **__: Any) -> Callable[..., Any]:
    """Return a decorator that changes nothing, for any arguments."""
    return unchanged


def get_event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this thread, creating one if there is none."""
    try:
        return asyncio.get_event_loop()
    except RuntimeError:  # not in the main thread
        asyncio.set_event_loop(asyncio.new_event_loop())
        return asyncio.get_event_loop()


def timeout_limit(seconds: float, use_signals: bool = False) -> Callable[..., Any]:
    """Raise TimeoutError after `seconds` in the main thread; elsewhere only reward.timeout applies."""

    def out_of_time(*_: Any) -> None:
        raise TimeoutError("the function took longer than its timeout_limit")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def limited(*arguments: Any, **named: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return function(*arguments, **named)
            before = signal.signal(signal.SIGALRM, out_of_time)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                return function(*arguments, **named)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)

        return limited

    return decorate


def by_name(*members: Any) -> dict[str, Callable[..., Any] | None]:
    """Return classes and functions by the names that they have in verl too."""
    return {member.__name__: member for member in members}


_MATH = {
    "compute_score": graders.math_score,
    "is_equiv": graders.same_in_math,
    "last_boxed_only_string": graders.math_box,
    "remove_boxed": graders.math_unboxed,
    "strip_string": graders.math_spelling,
}
_DEFAULT = dict.fromkeys(["default_compute_score", "_default_compute_score"], graders.default_compute_score)
_REWARD_MANAGERS = {"register": leaves_unchanged, "RawRewardFn": None}
# By verl's modules: each name in them, and the function that replaces it; None: a placeholder class.
NAMES: dict[str, dict[str, Callable[..., Any] | None]] = {
    "verl": {"DataProto": None},
    "verl.protocol": {"DataProto": None},
    _SCORE: _DEFAULT | {"get_default_compute_score": graders.get_default_compute_score},
    f"{_SCORE}.gsm8k": {"compute_score": graders.gsm8k_score, "extract_solution": graders.gsm8k_number},
    f"{_SCORE}.math": _MATH,
    f"{_SCORE}.math_reward": _MATH,
    f"{_SCORE}.math_batch": {"compute_score_batched": graders.math_scores},
    f"{_SCORE}.math_dapo": {
        "compute_score": graders.dapo_score,
        "is_correct_minerva": graders.minerva_verdict,
        "is_correct_strict_box": graders.strict_box_verdict,
        "last_boxed_only_string": graders.last_box,
        "normalize_final_answer": graders.minerva_spelling,
        "remove_boxed": graders.unboxed,
        "verify": graders.dapo_verdict,
    },
    f"{_SCORE}.math_verify": {"compute_score": graders.symbolic_score},
    f"{_SCORE}.prime_math": {"compute_score": graders.prime_score, "grade_answer": graders.grade_answer},
    f"{_SCORE}.geo3k": {
        "acc_reward": graders.geo3k_accuracy,
        "compute_score": graders.geo3k_score,
        "format_reward": thinks_then_boxes,
    },
    f"{_SCORE}.search_r1_like_qa_em": {
        "compute_score": graders.search_score,
        "compute_score_subem": graders.search_part_score,
        "em_check": graders.exact_match,
        "extract_solution": last_tagged,
        "normalize_answer": normalised,
        "subem_check": graders.part_match,
    },
    f"{_SCORE}.prime_code": {"compute_score": graders.code_score},
    f"{_SCORE}.prime_code.testing_util": {"run_test": graders.run_test},
    f"{_SCORE}.prime_code.utils": {"check_correctness": graders.check_correctness},
    f"{_SCORE}.sandbox_fusion": {"compute_score": graders.sandbox_score},
    "verl.experimental.reward_loop.reward_manager": _REWARD_MANAGERS,
    "verl.experimental.reward_loop.reward_manager.base": _REWARD_MANAGERS | {"RewardManagerBase": None},
    "verl.tools.base_tool": {"BaseTool": None, "OpenAIFunctionToolSchema": None},
    "verl.tools.sandbox_fusion_tools": {"SandboxFusionTool": None},
    "verl.tools.schemas": {"OpenAIFunctionToolSchema": None, "ToolResponse": None},
    "verl.utils.dataset": {"RLHFDataset": None},
    "verl.utils.dataset.rl_dataset": {"RLHFDataset": None},
    "verl.utils.import_utils": {"deprecated": leaves_unchanged},
    "verl.utils.model": {"compute_position_id_with_mask": None},
    "verl.utils.py_functional": {"timeout_limit": timeout_limit},
    "verl.utils.ray_utils": {"get_event_loop": get_event_loop},
    "verl.utils.rollout_trace": {"rollout_trace_op": unchanged},
    "verl.utils.torch_functional": {},
    "verl.workers.reward_manager": _REWARD_MANAGERS | {"AbstractRewardManager": None, "NaiveRewardManager": None},
    "verl.workers.reward_manager.abstract": {"AbstractRewardManager": None, "RawRewardFn": None},
}
_MODULES: set[str] = set()
_OFTEN_EDITED = ("verl.tools.gsm8k_tool", "verl.interactions.gsm8k_interaction")  # a copy's file comes before ours


def provide_verl_imports(names_by_module: Mapping[str, Mapping[str, Callable[..., Any] | None]] | None = None) -> None:
    """From now on `import verl...` in this process imports verl if that works, else the replacements.

    It adds `names_by_module` to them. A module without replacement is imported from a copy of verl, if there is one
    that does not import as a whole, as without its libraries.
    """
    for module, names in (names_by_module or {}).items():
        NAMES[module] = NAMES.get(module, {}) | names
    _MODULES.update(".".join(name.split(".")[:count]) for name in NAMES for count in range(1, name.count(".") + 2))
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Replacements(MetaPathFinder, Loader):
    """Finds verl and its submodules. The first import of verl decides whether the real one is used."""

    def __init__(self) -> None:
        self.cause: str | None = None  # why the real one is not used, once known

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "verl":
            self.cause = None
            replaced = ModuleSpec(name, self, is_package=True)
            for finder in sys.meta_path:
                spec = None if finder is self else finder.find_spec(name, path, target)
                if spec is not None and spec.origin is not None and spec.loader is not None:  # it has an __init__.py
                    spec.loader = _OrReplacement(spec.loader, self)
                    return spec
                replaced.submodule_search_locations += (spec and spec.submodule_search_locations) or []
            self.cause = "verl is not installed"
            return replaced
        if not name.startswith("verl.") or self.cause is None:
            return None
        copied = PathFinder.find_spec(name, path)
        if name in _MODULES and not (copied and name in _OFTEN_EDITED):
            spec = ModuleSpec(name, self, is_package=True)
            spec.submodule_search_locations = [f"{place}/{name.rpartition('.')[2]}" for place in path]
            return spec
        if copied is None:
            raise ModuleNotFoundError(self._missing(name), name=name)
        return copied

    def exec_module(self, module: ModuleType) -> None:
        def member(name: str) -> Any:
            full, names = f"{module.__name__}.{name}", NAMES.get(module.__name__, {})
            if name in names:
                return names[name] or placeholder(full)
            if full in _MODULES:
                return importlib.import_module(full)
            if name.startswith("__"):
                raise AttributeError(f"module {module.__name__} has no attribute {name}")
            raise ImportError(self._missing(full), name=full)

        vars(module)["__getattr__"] = member

    def _missing(self, name: str) -> str:
        parts = name.split(".")
        parents = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
        above = next(parent for parent in parents if parent in _MODULES)
        beginning = f"{above}."
        below = {other.removeprefix(beginning).partition(".")[0] for other in _MODULES if other.startswith(beginning)}
        existing = ", ".join(sorted({*NAMES.get(above, {}), *below}))
        advice = "copy what else the file needs into it"
        return f"{self.cause}, and {name} has no replacement; of {above} there are {existing}: {advice}"


class _OrReplacement(Loader):
    """Executes the real package, or replaces it if that fails, as for a clone without its libraries."""

    def __init__(self, real: Loader, replacements: _Replacements) -> None:
        self._real, self._replacements = real, replacements

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        try:
            with contained("verl"):
                self._real.exec_module(module)
        except UserCodeError as error:
            cause = f"the verl in {module.__file__} does not import ({type(error.cause).__name__}: {error.cause})"
            logger.warning("%s; replacements are used", cause)
            for name in [name for name in sys.modules if name.startswith("verl.")]:
                del sys.modules[name]
            self._replacements.cause = cause
            self._replacements.exec_module(module)


@once
def placeholder(name: str) -> type:
    """Return a class with the name of a verl class, which can be inherited from but not instantiated."""

    def reject(self: Any, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{name} is a class of verl, which is not installed; only reward functions run here")

    return type(name.rpartition(".")[2], (), {"__init__": reject, "__module__": name.rpartition(".")[0]})


_FINDER = _Replacements()
