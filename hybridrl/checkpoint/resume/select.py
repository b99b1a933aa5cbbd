"""Select the checkpoint that a run resumes from, and check that the configuration is compatible with it."""

from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from hybridrl.checkpoint.files import is_intact
from hybridrl.checkpoint.resume.config_diff import check_changes, config_changes
from hybridrl.checkpoint.resume.fingerprints import matching_run
from hybridrl.checkpoint.store import (
    STATE,
    Checkpoint,
    check,
    is_verl,
    newest_good,
    read_checkpoint,
    step_directories,
    step_number,
)
from hybridrl.checkpoint.verl.tensors import verl_faults
from hybridrl.config import ConfigError
from hybridrl.config.files import SHARDS

Log = Callable[[str], None]

CONFIG = "config.yaml"
ESSENTIAL = (STATE, SHARDS)  # a checkpoint cannot be read without these files


def select_checkpoint(mode: str, path: str | None, directory: Path, fingerprint: str, log: Log) -> Checkpoint | None:
    """Return the checkpoint to resume from by `trainer.resume_mode`, or None to start from scratch. That of verl has no
    state. One named by its path is used even if it is damaged or not healthy, with a warning."""
    if mode == "disable":
        return None
    if mode == "resume_path":
        return _from_path(path or "", log)
    checkpoint = newest_good(directory, log) or _newest_verl(directory, log)
    if checkpoint is None and (other := matching_run(directory, fingerprint)):
        log(f"{other} has checkpoints of the same data, model and estimator; starting from scratch")
    return checkpoint


def _from_path(path: str, log: Log) -> Checkpoint:
    key = f"trainer.resume_from_path={path}"
    step = Path(path).expanduser().absolute()
    step = step if step in step_directories(step.parent) else step.resolve()  # a link may have any name
    if step not in step_directories(step.parent) or not step.is_dir():
        raise ConfigError(f"{key}: there is no such checkpoint", fix="name one, .../global_step_N")
    if is_verl(step):
        faults, checkpoint = verl_faults(step), Checkpoint(step_number(step), step, {})
    else:
        faults, checkpoint = check(step), read_checkpoint(step)
    fatal = [fault for fault in faults if fault.partition(":")[0].endswith(ESSENTIAL)]
    if checkpoint is None or fatal:
        cause = f"{key}: {'; '.join(fatal or faults)}, without which it cannot be read"
        raise ConfigError(cause, fix="name another checkpoint")
    for fault in faults:
        log(f"warning: {key}: {fault}; using it anyway, as requested")
    return checkpoint


def _newest_verl(directory: Path, log: Log) -> Checkpoint | None:
    """Return the newest intact verl checkpoint. Not used once hybridrl has a good checkpoint in the directory, whatever
    its step: the run has continued since, or started over."""
    for path in filter(is_verl, reversed(step_directories(directory))):
        faults = verl_faults(path)
        if not faults:
            log(f"{path} was saved by verl: resuming from it (trainer.resume_mode=disable starts from scratch)")
            return Checkpoint(step_number(path), path, {})
        log(f"{path} is skipped: {'; '.join(faults[:3])}{'; and more' if len(faults) > 3 else ''}")
    return None


def check_compatible(
    checkpoint: Checkpoint,
    config: dict[str, Any],
    data: str,
    allow: list[str],
    reset_optimizer: bool,
    log: Log,
    bases: dict[str, str] | None = None,
) -> None:
    """Log what changed in the configuration since the save; raise ConfigError for impossible or unallowed changes.
    `data` is the fingerprint of the data, `bases` those of the models under LoRA adapters, by key."""
    for key, base in (bases or {}).items():
        if checkpoint.state.get("bases", {}).get(key, base) != base:
            path = reduce(lambda section, name: section[name], key.split("."), config)
            raise ConfigError(
                f"{key}={path}: the adapter saved in {checkpoint.path} was trained on a model with other weights",
                fix="name that model, or start from scratch: trainer.resume_mode=disable",
            )
    before = config
    if is_intact(checkpoint.path, CONFIG):
        before = yaml.safe_load((checkpoint.path / CONFIG).read_text(encoding="utf-8"))
    else:
        log(f"{checkpoint.path} has no intact {CONFIG}, so changes of the configuration are unknown")
    changes = config_changes(before, config, step=checkpoint.path, same_rows=checkpoint.state["data"] == data)
    check_changes(changes, allow, reset_optimizer, log)
