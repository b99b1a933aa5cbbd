"""Which saved step a run goes on from, and whether its configuration agrees with it."""

from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from hybridrl.checkpoint.manifest import is_intact
from hybridrl.checkpoint.resume.config_diff import changes, decide
from hybridrl.checkpoint.resume.fingerprints import sibling
from hybridrl.checkpoint.saved import (
    STATE,
    Saved,
    check,
    is_of_verl,
    newest_good,
    read_saved,
    step_directories,
    step_number,
)
from hybridrl.checkpoint.verl import verl_faults
from hybridrl.config import ConfigError
from hybridrl.config.model_directory import SHARDS

Say = Callable[[str], None]

CONFIG = "config.yaml"
WITHOUT_WHICH_NOTHING = (STATE, SHARDS)


def saved_step(mode: str, path: str | None, directory: Path, fingerprint: str, say: Say) -> Saved | None:
    """The step to go on from, by `trainer.resume_mode`; None: from the beginning. One that verl saved has no state.

    An explicit path is taken at the user's word, with a warning where it is not whole and healthy.
    """
    if mode == "disable":
        return None
    if mode == "resume_path":
        return _named(path or "", say)
    found = newest_good(directory, say) or _newest_of_verl(directory, say)
    if found is None and (other := sibling(directory, fingerprint)):
        say(f"{other} holds saved steps of the same data, model and estimator; this run starts anew")
    return found


def _named(path: str, say: Say) -> Saved:
    key = f"trainer.resume_from_path={path}"
    step = Path(path).expanduser().absolute()
    step = step if step in step_directories(step.parent) else step.resolve()  # a link may have any name
    if step not in step_directories(step.parent) or not step.is_dir():
        raise ConfigError(f"{key}: there is no such saved step; name one, .../global_step_N")
    if is_of_verl(step):
        faults, saved = verl_faults(step), Saved(step_number(step), step, {})
    else:
        faults, saved = check(step), read_saved(step)
    fatal = [fault for fault in faults if fault.partition(":")[0].endswith(WITHOUT_WHICH_NOTHING)]
    if saved is None or fatal:
        raise ConfigError(f"{key}: {'; '.join(fatal or faults)}, without which it cannot be read; name another step")
    for fault in faults:
        say(f"warning: {key}: {fault}; it is taken at your word")
    return saved


def _newest_of_verl(directory: Path, say: Say) -> Saved | None:
    """For a run that verl began in this directory. Not asked as soon as there is a good step of ours, whatever its
    number: the run has gone on since, or was to begin anew."""
    for path in filter(is_of_verl, reversed(step_directories(directory))):
        faults = verl_faults(path)
        if not faults:
            say(f"{path} was saved by verl: the run goes on from there (trainer.resume_mode=disable: it begins anew)")
            return Saved(step_number(path), path, {})
        say(f"{path} is passed over: {'; '.join(faults[:3])}{'; and more' if len(faults) > 3 else ''}")
    return None


def agree(
    saved: Saved,
    config: dict[str, Any],
    data: str,
    allow: list[str],
    reset_optimizer: bool,
    say: Say,
    bases: dict[str, str] | None = None,
) -> None:
    """Say what changed in the configuration since the save; ConfigError for what cannot be, or was not allowed.

    `bases` are the fingerprints of the models that adapters are trained on, by the keys that name them.
    """
    for key, base in (bases or {}).items():
        if saved.state.get("bases", {}).get(key, base) != base:
            path = reduce(lambda section, name: section[name], key.split("."), config)
            raise ConfigError(
                f"{key}={path}: the adapter saved in {saved.path} was trained on a model with other weights; name that "
                "one, or start anew: trainer.resume_mode=disable"
            )
    before = config
    if is_intact(saved.path, CONFIG):
        before = yaml.safe_load((saved.path / CONFIG).read_text(encoding="utf-8"))
    else:
        say(f"{saved.path} has no {CONFIG} to be relied on, so what changed in the configuration is not known")
    found = changes(before, config, step=saved.path, same_rows=saved.state["data"] == data)
    decide(found, allow, reset_optimizer, say)
