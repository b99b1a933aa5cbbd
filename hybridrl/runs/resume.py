"""Resuming: selection of the checkpoint, and loading of its parts."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from hybridrl.checkpoint.read import check_parts
from hybridrl.checkpoint.resume import (
    check_compatible,
    code_fingerprint,
    data_fingerprint,
    fingerprint,
    flatten,
    model_fingerprint,
    resume_summary,
    select_checkpoint,
)
from hybridrl.checkpoint.saver import Stateful, read_arrays
from hybridrl.checkpoint.store import (
    Checkpoint,
    is_verl,
    list_checkpoints,
    step_directories,
    step_number,
)
from hybridrl.config import ConfigError, PPOConfig, TrainingConfig
from hybridrl.config.compose import as_yaml
from hybridrl.config.files import read_mapping
from hybridrl.config.schema import SFTTrainerConfig
from hybridrl.core.algorithms import Algorithm
from hybridrl.core.training.worker_group import TrainWorkers
from hybridrl.data.processor import version_change
from hybridrl.data.row_files import fingerprinted_files
from hybridrl.plugins import load
from hybridrl.runs.models import run_models
from hybridrl.runs.settings import contents_to_save
from hybridrl.tracking.console import info

RESETTABLE = ("optimizer", "schedule")
DIRECTORY = "trainer.default_local_dir"
MOST_CHANGED = 5  # values that a message names
LEARNED = ("trainer.seed", "trainer.critic_warmup")
PLANNED = ("enable_gradient_checkpointing", "compile_layers", "ppo_max_token_len_per_gpu")  # follow from the machine

Say = Callable[[str], None]


@dataclass(frozen=True)
class Identity:
    """Fingerprints by which a run, its data, and the models under adapters (by their keys) are recognised."""

    data: str
    run: str
    bases: dict[str, str]

    def state(self) -> dict[str, Any]:
        """The identity as stored in every checkpoint of the run."""
        return {"fingerprint": self.run, "data": self.data, "bases": self.bases, "code": code_fingerprint()}


@dataclass(frozen=True)
class ResumePlan:
    """The checkpoint from which a run resumes, if any, and its number of steps.

    `contents` are the parts read of each model in the checkpoint. `total_prompts` ends a run without a fixed number of
    steps: dynamic sampling may use up the prompts earlier.
    """

    identity: Identity
    checkpoint: Checkpoint | None
    contents: dict[str, list[str]]
    steps: int
    total_prompts: int | None = None

    @property
    def done(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def prompts_used(self) -> int:
        return self.checkpoint.state["prompts"] if self.checkpoint else 0


def plan_resume(
    config: PPOConfig, algorithm: Algorithm, rows: int, epoch: int, directory: Path, say: Say = info, *pictures: str
) -> ResumePlan:
    """Plan a run over data with `rows` rows and `epoch` prompts per epoch. `pictures` are the settings that read those
    of rows. Writes nothing. Raises ConfigError if a checkpoint and the configuration do not go together."""
    trainer, data, section, critic = config.trainer, config.data, config.actor_rollout_ref, config.critic
    models = {key: model for key, model in run_models(config, algorithm).items() if model.lora_rank}
    content = data_fingerprint(fingerprinted_files(data), rows, data.prompt_key, data.train_max_samples, *pictures)
    run = fingerprint(content, section.model.path, config.algorithm.adv_estimator)
    identity = Identity(content, run, {f"{key}.path": model_fingerprint(model.path) for key, model in models.items()})

    def from_verl(saved: Checkpoint) -> Checkpoint:
        facts = {"prompts_per_step": data.train_batch_size, "rows": epoch, "data": identity.data}
        weight = config.algorithm.kl_ctrl.kl_coef
        state = load("verl.checkpoint").state_from_verl(saved.step, saved.path, **facts, kl_weight=weight, log=say)
        return replace(saved, state=state)

    saved = find_checkpoint(trainer, asdict(config), directory, identity, from_verl, say)
    if saved and pictures and (change := version_change(saved.state.get("code", {}))):
        say(f"warning: {saved.path}: {change}")
    trained = {"actor": section.actor.checkpoint.load_contents, "critic": critic.checkpoint.load_contents}
    saves = contents_to_save(section, critic, algorithm)
    requested = {name: trained.get(name, parts) for name, parts in saves.items()}
    contents = contents_to_load(trainer, requested, saved.path, say) if saved else {}
    plan = ResumePlan(identity, saved, contents, trainer.total_training_steps or 0)
    if plan.steps:
        return plan
    # Without a fixed number of steps, the last step takes all prompts that are left, however few.
    total, size = trainer.total_epochs * epoch, data.train_batch_size
    counted = not config.algorithm.filter_groups.enable  # its steps use up as many prompts as they need
    rest = (total - plan.prompts_used) % size if counted else 0
    if rest and data.drop_last:
        total -= rest
    elif rest:
        say(f"the last step has {rest} prompts instead of {size}; data.drop_last=true leaves them out")
    steps = plan.done - (plan.prompts_used - total) // size
    return replace(plan, steps=steps, total_prompts=total)


def check_complete(config: TrainingConfig, plan: ResumePlan, directory: Path) -> Checkpoint | None:
    """Return the run's last checkpoint if all steps of the plan are done, even if no run could resume from it.

    Raises ConfigError if they are done and the configuration has changed: nothing would be trained with it.
    """
    checkpoints = list_checkpoints(directory) if config.trainer.resume_mode == "auto" else []
    if (last := plan.checkpoint or next(reversed(checkpoints), None)) is None or last.step < plan.steps:
        return None
    changed = _changed_values(as_yaml(config), directory / "config.yaml")
    if last.path.parent == directory and changed:
        raise ConfigError(
            f"{DIRECTORY}={directory}: the run there is complete ({last.step} of {plan.steps} steps), with "
            f"{'; '.join(changed[:MOST_CHANGED])}",
            fix=f"set another {DIRECTORY} for a new run, or higher trainer.total_training_steps to continue this one",
            keys=DIRECTORY,
        )
    return last


def _changed_values(settings: str, file: Path) -> list[str]:
    """Describe how settings, as YAML, differ from those in a file; from `trainer` only keys that affect learning."""
    if not file.exists():
        return []
    try:
        before, now = flatten(read_mapping(file)), flatten(yaml.safe_load(settings))
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read: {error}", fix=f"set another {DIRECTORY}", keys=DIRECTORY) from error
    counted = [key for key in now if key in LEARNED or not key.startswith(("trainer.", "eval."))]
    changed = [key for key in counted if before.get(key, now[key]) != now[key] and not key.endswith(PLANNED)]
    return [f"{key}={before[key]}, not {now[key]}" for key in changed]


def find_checkpoint(
    trainer: SFTTrainerConfig,
    settings: dict[str, Any],
    directory: Path,
    identity: Identity,
    from_verl: Callable[[Checkpoint], Checkpoint] | None = None,
    say: Say = info,
) -> Checkpoint | None:
    """The checkpoint to resume from, if any; `from_verl` adds the missing state to one of verl's (None: rejected).

    With `trainer.resume_mode=auto` a run begins at the checkpoint that is named, if any, and resumes from its own
    ones of that step or later. Raises ConfigError if there are earlier ones only, or if the checkpoint is not
    compatible with the run's `settings`, which are its configuration.
    """
    mode, begin = trainer.resume_mode, Path(trainer.resume_from_path or "").expanduser()
    continues = mode == "auto" and trainer.resume_from_path is not None
    if continues and not step_directories(directory) and begin.parent.resolve() != directory.resolve():
        mode = "resume_path"  # another run's, until this one has a checkpoint of its own
    saved = select_checkpoint(mode, trainer.resume_from_path, directory, identity.run, say)
    if continues and mode == "auto" and (saved is None or saved.step < step_number(begin)):
        at = f"step {saved.step}" if saved else "no step"
        cause = f"{trainer.experiment_name} continues from {begin.name} (trainer.resume_from_path)"
        fix = "first run what trains up to there, or leave trainer.resume_from_path out"
        raise ConfigError(f"{cause}, and {directory} is at {at}", fix=fix)
    if saved is None:
        return None
    if is_verl(saved.path):
        if from_verl is None:
            fix = f"to start from its weights: trainer.resume_mode=disable model.path={saved.path}/actor"
            raise ConfigError(f"{saved.path} is a verl checkpoint; SFT cannot resume from it", fix=fix)
        saved = from_verl(saved)
    allowed = trainer.resume_allow, trainer.reset_optimizer
    check_compatible(saved, settings, identity.data, *allowed, say, identity.bases)
    return saved


def contents_to_load(
    trainer: SFTTrainerConfig, requested: dict[str, list[str]], checkpoint: Path, say: Say = info
) -> dict[str, list[str]]:
    """The parts read of each model in a checkpoint, always its weights. Raises ConfigError if a part is missing or
    unreadable; moments and schedule may be missing unless the checkpoint was named."""
    loaded, optional = set() if resets_optimizer(trainer) else {"optimizer", "extra"}, trainer.resume_mode == "auto"
    contents = {}
    for name, parts in requested.items():
        if name not in ("actor", "critic") and not (checkpoint / name).is_dir():
            say(f"{checkpoint} has no {name}: it starts from the weights of its path")
            continue
        parts = ["model", *(part for part in parts if part in loaded)]
        contents[name] = check_parts(checkpoint / name, parts, optional=optional)
    return contents


def restore(
    trainer: SFTTrainerConfig,
    plan: ResumePlan,
    workers: TrainWorkers,
    parts: Mapping[str, Stateful],
    rows: int,
    *,
    kl_in_reward: bool,
) -> None:
    """Load a plan's checkpoint into workers and parts, and log what was restored; an epoch has `rows` prompts."""
    saved, contents = plan.checkpoint, plan.contents
    assert saved is not None
    updates = workers.load(saved.path, contents)
    state = saved.state | read_arrays(saved.path)
    for part in parts.values():
        part.load_state_dict(state)
    from_verl, missing = is_verl(saved.path), {}
    if resets_optimizer(trainer):
        missing |= {f"{what} of {name}": "trainer.reset_optimizer" for name in updates for what in RESETTABLE}
    if from_verl:
        verl = load("verl.checkpoint")
        missing |= verl.NOT_FROM_VERL | (verl.NO_KL_WEIGHT if kl_in_reward else {})
    info(
        resume_summary(
            saved.path,
            saved.step,
            weights=[name for name, chosen in contents.items() if "model" in chosen],
            optimizers=[name for name, chosen in contents.items() if "optimizer" in chosen],
            updates={name: count for name, count in updates.items() if "extra" in contents[name]},
            prompts=plan.prompts_used,
            rows=rows,
            kl_weight=saved.state["kl_weight"] if kl_in_reward and not from_verl else None,
            trackers=[] if from_verl else ["metrics.jsonl", *sorted(saved.state["sinks"])],
            missing=missing,
        )
    )


def resets_optimizer(trainer: SFTTrainerConfig) -> bool:
    """Whether moments are not restored: moments of another type of optimizer are useless, even if it was allowed."""
    return trainer.reset_optimizer or any(key.endswith("optim.optimizer") for key in trainer.resume_allow)
