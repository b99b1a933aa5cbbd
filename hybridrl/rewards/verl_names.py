"""Let reward files `import verl...`: replacements for verl's graders and helpers if verl itself is not installed.

The graders are in `verl_graders.py`; decorators, and classes to inherit from or to annotate with, are here.
"""

import asyncio
import functools
import importlib
import logging
import signal
import sys
import threading
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

_GRADERS, _TEXTS = "hybridrl.rewards.verl_graders", "hybridrl.rewards.scorers.texts"
_HERE = "hybridrl.rewards.verl_names"
_SCORE = "verl.utils.reward_score"

_DEFAULT = {name: f"{_GRADERS}.default_compute_score" for name in ("default_compute_score", "_default_compute_score")}
_MATH = {
    "compute_score": f"{_GRADERS}.math_score",
    "is_equiv": f"{_TEXTS}.same_in_math",
    "last_boxed_only_string": f"{_TEXTS}.math_box",
    "remove_boxed": f"{_TEXTS}.math_unboxed",
    "strip_string": f"{_TEXTS}.math_spelling",
}
_REWARD_MANAGERS = {"register": f"{_HERE}.leaves_unchanged", "RawRewardFn": ""}
# By verl's modules: each name in them, and the function that replaces it; empty: a placeholder class.
NAMES: dict[str, dict[str, str]] = {
    "verl": {"DataProto": ""},
    "verl.protocol": {"DataProto": ""},
    _SCORE: _DEFAULT | {"get_default_compute_score": f"{_GRADERS}.get_default_compute_score"},
    f"{_SCORE}.gsm8k": {
        "compute_score": f"{_GRADERS}.gsm8k_score",
        "extract_solution": f"{_GRADERS}.gsm8k_number",
    },
    f"{_SCORE}.math": _MATH,
    f"{_SCORE}.math_reward": _MATH,
    f"{_SCORE}.math_batch": {"compute_score_batched": f"{_GRADERS}.math_scores"},
    f"{_SCORE}.math_dapo": {
        "compute_score": f"{_GRADERS}.dapo_score",
        "is_correct_minerva": f"{_GRADERS}.minerva_verdict",
        "is_correct_strict_box": f"{_GRADERS}.strict_box_verdict",
        "last_boxed_only_string": f"{_TEXTS}.last_box",
        "normalize_final_answer": f"{_TEXTS}.minerva_spelling",
        "remove_boxed": f"{_TEXTS}.unboxed",
        "verify": f"{_GRADERS}.dapo_verdict",
    },
    f"{_SCORE}.math_verify": {"compute_score": f"{_GRADERS}.symbolic_score"},
    f"{_SCORE}.prime_math": {
        "compute_score": f"{_GRADERS}.prime_score",
        "grade_answer": f"{_GRADERS}.grade_answer",
    },
    f"{_SCORE}.geo3k": {
        "acc_reward": f"{_GRADERS}.geo3k_accuracy",
        "compute_score": f"{_GRADERS}.geo3k_score",
        "format_reward": f"{_GRADERS}.geo3k_format",
    },
    f"{_SCORE}.search_r1_like_qa_em": {
        "compute_score": f"{_GRADERS}.search_score",
        "compute_score_subem": f"{_GRADERS}.search_part_score",
        "em_check": f"{_GRADERS}.exact_match",
        "extract_solution": f"{_TEXTS}.last_tagged",
        "normalize_answer": "hybridrl.rewards.scorers.short_answers.normalised",
        "subem_check": f"{_GRADERS}.part_match",
    },
    f"{_SCORE}.prime_code": {"compute_score": f"{_GRADERS}.code_score"},
    f"{_SCORE}.prime_code.testing_util": {"run_test": f"{_GRADERS}.run_test"},
    f"{_SCORE}.prime_code.utils": {"check_correctness": f"{_GRADERS}.check_correctness"},
    f"{_SCORE}.sandbox_fusion": {"compute_score": f"{_GRADERS}.sandbox_score"},
    "verl.experimental.reward_loop.reward_manager": _REWARD_MANAGERS,
    "verl.experimental.reward_loop.reward_manager.base": _REWARD_MANAGERS | {"RewardManagerBase": ""},
    "verl.tools.base_tool": {"BaseTool": "", "OpenAIFunctionToolSchema": ""},
    "verl.tools.sandbox_fusion_tools": {"SandboxFusionTool": ""},
    "verl.tools.schemas": {"OpenAIFunctionToolSchema": "", "ToolResponse": ""},
    "verl.utils.dataset": {"RLHFDataset": ""},
    "verl.utils.dataset.rl_dataset": {"RLHFDataset": ""},
    "verl.utils.import_utils": {"deprecated": f"{_HERE}.leaves_unchanged"},
    "verl.utils.model": {"compute_position_id_with_mask": ""},
    "verl.utils.py_functional": {"timeout_limit": f"{_HERE}.timeout_limit"},
    "verl.utils.ray_utils": {"get_event_loop": f"{_HERE}.get_event_loop"},
    "verl.utils.rollout_trace": {"rollout_trace_op": f"{_HERE}.unchanged"},
    "verl.utils.torch_functional": {},
    "verl.workers.reward_manager": _REWARD_MANAGERS | {"AbstractRewardManager": "", "NaiveRewardManager": ""},
    "verl.workers.reward_manager.abstract": {"AbstractRewardManager": "", "RawRewardFn": ""},
}
_MODULES = {".".join(name.split(".")[:count]) for name in NAMES for count in range(1, name.count(".") + 2)}


def provide_verl_imports() -> None:
    """From now on `import verl...` in this process imports verl if that works, else the replacements."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Replacements(MetaPathFinder, Loader):
    """Finds verl and its submodules. The first import of verl decides whether the real one is used."""

    def __init__(self) -> None:
        self.cause: str | None = None  # why the real one is not used, once known

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "verl":
            real = self._real(name, path, target)
            self.cause = None if real else "verl is not installed"
            return real or ModuleSpec(name, self, is_package=True)
        if not name.startswith("verl.") or self.cause is None:
            return None
        if name not in _MODULES:
            raise ModuleNotFoundError(self._missing(name), name=name)
        return ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = functools.partial(self._member, module.__name__)  # type: ignore[method-assign]

    def replace(self, module: ModuleType, cause: str) -> None:
        """Turn the package of a verl that does not import into the replacement."""
        for name in [name for name in sys.modules if name.startswith("verl.")]:
            del sys.modules[name]
        self.cause, module.__path__ = cause, []
        self.exec_module(module)

    def _real(self, *wanted: Any) -> ModuleSpec | None:
        """Return the spec of a verl package with an __init__.py, whose failure to import is tolerated."""
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(*wanted)
            if spec is not None and spec.origin is not None and spec.loader is not None:
                spec.loader = _OrReplacement(spec.loader, self)
                return spec
        return None

    def _member(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        target = NAMES.get(module, {}).get(name)
        if target is None and full in _MODULES:
            return importlib.import_module(full)
        if target is None and name.startswith("__"):
            raise AttributeError(f"module {module} has no attribute {name}")
        if target is None:
            raise ImportError(self._missing(full), name=full)
        home, _, function = target.rpartition(".")
        return vars(importlib.import_module(home))[function] if target else placeholder(full)

    def _missing(self, name: str) -> str:
        parts = name.split(".")
        parents = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
        above = next(parent for parent in parents if parent in _MODULES)
        below = {
            other.removeprefix(f"{above}.").partition(".")[0] for other in _MODULES if other.startswith(f"{above}.")
        }
        return (
            f"{self.cause}, and {name} has no replacement; of {above} there are "
            f"{', '.join(sorted({*NAMES.get(above, {}), *below}))}: copy what else the file needs into it"
        )


class _OrReplacement(Loader):
    """Executes the real package, or replaces it if that fails, as for a clone without its libraries."""

    def __init__(self, real: Loader, replacements: _Replacements) -> None:
        self._real, self._replacements = real, replacements

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        try:
            self._real.exec_module(module)
        except Exception as error:
            cause = f"the verl in {module.__file__} does not import ({type(error).__name__}: {error})"
            logger.warning("%s; replacements are used", cause)
            self._replacements.replace(module, cause)


@functools.cache
def placeholder(name: str) -> type:
    """Return a class with the name of a verl class, which can be inherited from but not instantiated."""

    def reject(self: Any, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{name} is a class of verl, which is not installed; only reward functions run here")

    return type(name.rpartition(".")[2], (), {"__init__": reject, "__module__": name.rpartition(".")[0]})


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


_FINDER = _Replacements()
