"""Subjects of an evaluation: models (directories, checkpoints, runs and addresses), as `eval.models` names them."""

import re
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

import numpy as np

from hybridrl.config import ConfigError
from hybridrl.config.findings import Findings
from hybridrl.model_merger import base_model
from hybridrl.runs.directory import CONFIG, RunDirectory, SavedCheckpoint
from hybridrl.tracking.sink import is_validation_score

RESULTS = "results.json"  # an evaluation's numbers
CHOICES = ("best", "last", "all")
KEY = "eval.models"
ADDRESS = ("http://", "https://")  # beginnings of an address
FOLDER = "actor"  # the policy in a checkpoint


@dataclass(frozen=True)
class Target:
    """A model to evaluate: a directory, a name of the hub, or an address."""

    name: str
    path: str
    key: str = KEY  # the setting that names it

    @property
    def is_address(self) -> bool:
        return self.path.startswith(ADDRESS)

    @property
    def whole_path(self) -> str:
        """The model to check: the path itself, or the base of an adapter (they are merged later)."""
        return base_model(self.path, self.key)


def find_targets(names: list[str], keep_best: str | None = None, key: str = KEY) -> list[Target]:
    """Return the models of these names; a run may give several. `keep_best`: the metric for the choice `best`. Raises
    ConfigError with all names that lead to no model."""
    findings, targets = Findings(), []
    for name in names:
        with findings.gathered():
            targets += _find(name, keep_best, key)
    findings.close()
    return [replace(target, key=key) for target in with_unique_names(targets)]


def _find(name: str, keep_best: str | None, key: str) -> list[Target]:
    if name.startswith(ADDRESS):
        return [Target(re.sub(r"\W+", "-", name.partition("://")[2]).strip("-"), name.rstrip("/"))]
    path, _, choice = name.rpartition(":")
    selects, is_run = choice in CHOICES or choice.isdecimal(), bool(path) and Path(path).expanduser().is_dir()
    if not (selects and is_run):
        if is_run and not Path(name).exists():
            raise ConfigError(f"{key}={name}: {choice} is not a choice", fix=f"choose {' | '.join(CHOICES)} | STEP")
        path, choice = name, ""
    directory = Path(path).expanduser()
    if checkpoints := RunDirectory(directory).checkpoints:
        chosen = _chosen(checkpoints, choice or "last", keep_best, f"{key}={name}")
        return [Target(f"{directory.resolve().name}-{step.path.name}", _policy(step.path, key)) for step in chosen]
    if directory.is_dir() and not choice:
        if re.fullmatch(r"global_step_\d+", directory.name) or (directory / FOLDER).is_dir():
            return [Target(_short_name(directory), _policy(directory, key))]
        if (directory / RESULTS).is_file():
            cause = f"{key}={name} is the directory of an evaluation"
            raise ConfigError(cause, fix=f"eval.compare={name} compares with it")
    if choice or ((directory / CONFIG).is_file() and not (directory / "config.json").is_file()):
        fix = "name a directory that has global_step_N; a run with trainer.save_freq=10 saves every tenth step"
        raise ConfigError(f"{key}={name}: {path} has no checkpoints", fix=fix)
    return [Target(_short_name(directory), str(directory) if directory.is_dir() else name)]


def _policy(step: Path, key: str) -> str:
    """Return the policy's folder of a checkpoint."""
    folder = step / FOLDER
    if not folder.is_dir():
        cause = f"{key}={step}: the checkpoint has no folder {FOLDER}"
        raise ConfigError(cause, fix="name a directory with a model")
    return str(folder)


def _chosen(
    checkpoints: list[SavedCheckpoint], choice: str, keep_best: str | None, setting: str
) -> list[SavedCheckpoint]:
    """Return the checkpoints of a run for a choice, by step."""
    if choice.isdecimal():
        if not (chosen := [saved for saved in checkpoints if saved.step == int(choice)]):
            steps = " | ".join(str(saved.step) for saved in checkpoints)
            raise ConfigError(f"{setting}: there is no checkpoint of step {choice}", fix=f"choose {steps}")
        return chosen
    if not (checkpoints := [saved for saved in checkpoints if saved.has_model]):
        fix = "save one whose checkpoint.save_contents has model"
        raise ConfigError(f"{setting}: its checkpoints have no model", fix=fix)
    good = [saved for saved in checkpoints if saved.current and not saved.unhealthy]
    if not good or any(saved.kind == "verl" for saved in checkpoints):  # verl records no state
        if choice == "best":
            cause = f"{setting}: its checkpoints have no validation scores"
            raise ConfigError(cause, fix="evaluate all of them on a set kept for choosing")
        good = checkpoints
    if choice == "best":
        return [_best(good, keep_best, setting)]
    return good if choice == "all" else good[-1:]


def _best(checkpoints: list[SavedCheckpoint], keep_best: str | None, setting: str) -> SavedCheckpoint:
    """Return the checkpoint with the best validation: by the metric `keep_best` (with a leading "-" the least is best),
    else by the mean over the data sources that have a score in every validation."""
    validated = [set(filter(is_validation_score, saved.state["metrics"])) for saved in checkpoints]
    common = set.intersection(*filter(None, validated)) if any(validated) else set()

    def score(saved: SavedCheckpoint) -> float:
        values = saved.state["metrics"]
        if keep_best:
            return values.get(keep_best.removeprefix("-"), np.nan) * (-1 if keep_best.startswith("-") else 1)
        scores = [values[name] for name in common if name in values]
        return float(np.mean(scores)) if scores else np.nan

    measured = [saved for saved in checkpoints if not np.isnan(score(saved))]
    if not measured:
        what = keep_best.removeprefix("-") if keep_best else "validation score"
        raise ConfigError(f"{setting}: no checkpoint has a {what}", fix="name last or all")
    return max(measured, key=score)


def _short_name(directory: Path) -> str:
    """Return a name for a directory: inside a checkpoint, the checkpoint's name."""
    parts = directory.resolve().parts if directory.is_dir() else directory.parts
    step = next((index for index, part in enumerate(parts) if re.fullmatch(r"global_step_\d+", part)), None)
    if step is None:
        return parts[-1]
    return "-".join(parts[max(step - 1, 0) : step + 1]).strip("/-")


def with_unique_names(targets: list[Target]) -> list[Target]:
    """Return the models, with numbers after repeated names: adding a model renames no earlier one."""
    named: dict[str, Target] = {}
    for target in targets:
        names = chain([target.name], (f"{target.name}-{number}" for number in count(2)))
        name = next(name for name in names if name not in named)
        named[name] = replace(target, name=name)
    return list(named.values())
