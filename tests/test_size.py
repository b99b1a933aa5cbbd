"""How large the packages are. A change that makes one grow edits its budget here, and says why in its message."""

import subprocess
import sys
from pathlib import Path

from hybridrl.config.schema import PPOConfig, SFTConfig
from hybridrl.config.values import value_keys

PACKAGE = Path(__file__).parent.parent / "hybridrl"
# Lines of Python, by package; "." are the commands and what they share.
LINES = {
    ".": 1121,
    "agents": 7553,
    "checkpoint": 2028,
    "compat": 3247,
    "config": 5423,
    "core": 15395,
    "data": 2788,
    "doctor": 5167,
    "environments": 182,
    "evaluation": 2305,
    "health": 1074,
    "launch": 267,
    "model_merger": 931,
    "report": 2550,
    "rewards": 3797,
    "runs": 4329,
    "runtime": 1604,
    "tracking": 2010,
}
# The sum of all budgets. A change that raises one lowers another by as much; only a new capability raises the sum.
TOTAL = 61771
FILES = {"core": 76, "hybridrl": 290}
KEYS = 461  # of all configurations
FACES = ("agents", "evaluation", "report", "doctor", "compat", "environments", "launch", "serve")
# A process that holds a model or an engine, and modules that a run needs: no face is among what they import.
IMPORTED = "hybridrl.core.trainer, hybridrl.runs.ppo, hybridrl.runs.sft, hybridrl.core.rollout.server"


def lines(directory: Path, pattern: str = "**/*.py") -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in directory.glob(pattern))


def test_no_package_is_larger_than_its_budget() -> None:
    sizes = {path.name: lines(path) for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    sizes["."] = lines(PACKAGE, "*.py")
    assert sizes.keys() == LINES.keys()
    too_large = {name: size for name, size in sizes.items() if size > LINES[name]}
    assert not too_large, "make it smaller, or raise its budget and say why"


def test_budgets_are_the_sizes_of_the_packages_and_not_their_room_to_grow() -> None:
    sizes = {path.name: lines(path) for path in PACKAGE.iterdir() if path.name in LINES} | {".": lines(PACKAGE, "*.py")}
    assert sum(LINES.values()) <= TOTAL, "lower another budget by as much"
    assert not {name: size for name, size in sizes.items() if size < 0.99 * LINES[name]}, "lower these budgets"


def test_no_more_files_than_the_budget() -> None:
    assert len([*(PACKAGE / "core").glob("**/*.py")]) <= FILES["core"]
    assert len([*PACKAGE.glob("**/*.py")]) <= FILES["hybridrl"]


def test_no_more_keys_than_the_budget() -> None:
    assert len({*value_keys(PPOConfig), *value_keys(SFTConfig)}) <= KEYS


def test_the_core_and_a_run_import_no_face() -> None:
    code = f"import sys, {IMPORTED}; print(*(name for name in sys.modules if name.startswith('hybridrl.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [name for name in done.stdout.split() if name.split(".")[1] in FACES] == []
