"""Saved steps as they lie on the disk: which there are, which are whole and healthy, which may go.

Reads only, and takes no lock: a run may be at work in the directory. Never knows what a step's files hold.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.manifest import faults, is_intact
from hybridrl.config.model_directory import VERL_SHARDS

STATE = "state.json"
NEEDED = {"healthy", "recovery", "metrics"}


@dataclass(frozen=True)
class Saved:
    """A published step. Its state has "healthy" and "recovery" (bool), "metrics" (numbers by name), "published" (how
    many steps its directory had seen with it), "reason" where it is not healthy, and whatever the driver put there."""

    step: int
    path: Path
    state: dict[str, Any]


def saved_steps(directory: Path) -> list[Saved]:
    """The published steps of a directory, oldest first as they were published, which is by number unless a run went
    back; one whose state is damaged is left out, as a wrong order would cast out others."""
    found = (read_saved(path) for path in step_directories(directory) if is_intact(path, STATE))
    return sorted((saved for saved in found if saved is not None), key=lambda saved: saved.state["published"])


def read_saved(path: Path) -> Saved | None:
    """A step, whole or not, if its state is there and can be read."""
    state = _read_state(path)
    return None if state is None else Saved(step_number(path), path, state)


def check(path: Path) -> list[str]:
    """What is wrong with a saved step, in words: that it is not healthy, and each damaged file."""
    wrong, state = faults(path), _read_state(path)
    if state is None:
        return wrong or [f"{STATE}: not that of a saved step"]
    return wrong if state["healthy"] else [f"not healthy: {state.get('reason', 'the reason is not told')}", *wrong]


def course(saved: list[Saved]) -> list[Saved]:
    """The steps that led to the newest one. A run that went back, by an explicit path or past a damaged step, has
    left behind what lies between; to go on from there would be another run."""
    found: list[Saved] = []
    for newer in saved:
        found = [older for older in found if older.step < newer.step] + [newer]
    return found


def newest_good(directory: Path, say: Callable[[str], None]) -> Saved | None:
    """The newest step that is whole and healthy; `say` is told of each that is passed over, and why."""
    saved = {one.path: one for one in saved_steps(directory)}
    on_course = {one.path for one in course(list(saved.values()))}
    for path in reversed(step_directories(directory)):
        if is_of_verl(path):
            continue
        left_behind = path in saved and path not in on_course
        reasons = ["the run has gone back to an earlier step since"] if left_behind else check(path)
        if path in saved and not reasons:
            return saved[path]
        say(f"{path} is passed over: {'; '.join(reasons[:3])}{'; and more' if len(reasons) > 3 else ''}")
    return None


def staying(saved: list[Saved], keep: int | None, keep_best: str | None) -> list[Saved]:
    """The steps that retention leaves. One saved for recovery gives way to the next; none gives way to a step that is
    not healthy, and those that a run has left behind go first."""
    healthy = [one for one in saved if one.state["healthy"]]
    regular = [one for one in saved if not one.state["recovery"]]
    on_course = {one.step for one in course(saved)}
    sound = sorted((one for one in regular if one.state["healthy"]), key=lambda one: one.step in on_course)
    kept = regular if keep is None else sound[-keep:]
    return [*saved[-1:], *healthy[-1:], *kept, *(_best(sound, keep_best) if keep_best else ())]


def step_directories(directory: Path) -> list[Path]:
    """Every `global_step_N`, whole or not, by number."""
    found = (path for path in directory.glob("global_step_*") if re.fullmatch(r"global_step_\d+", path.name))
    return sorted(found, key=step_number)


def is_of_verl(path: Path) -> bool:
    """Whether verl saved the step."""
    return any(True for _ in path.glob(f"actor/{VERL_SHARDS}"))


def step_number(path: Path) -> int:
    """The N in the name of a step's directory, hidden or not."""
    return int(re.findall(r"\d+", path.name)[0])


def _best(saved: list[Saved], metric: str) -> list[Saved]:
    """The newest of the best, if any has the metric."""
    name, sign = metric.removeprefix("-"), -1 if metric.startswith("-") else 1
    measured = [one for one in saved if not math.isnan(one.state["metrics"].get(name, math.nan))]
    return sorted(measured, key=lambda one: sign * one.state["metrics"][name])[-1:]


def _read_state(path: Path) -> dict[str, Any] | None:
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) and state.keys() >= {*NEEDED, "published"} else None
