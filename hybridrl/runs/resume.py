"""Resuming: which checkpoint a run starts from, what is read of it, and where that goes."""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from hybridrl.checkpoint.files import code_fingerprint, data_fingerprint, fingerprint, model_fingerprint
from hybridrl.checkpoint.read import check_parts
from hybridrl.checkpoint.resume import check_compatible, flatten, resume_summary, select_checkpoint
from hybridrl.checkpoint.saver import Stateful, read_arrays
from hybridrl.checkpoint.store import Checkpoint, is_verl
from hybridrl.config import ConfigError, PPOConfig, SFTConfig
from hybridrl.config.compose import as_yaml
from hybridrl.config.custom_code import script_path
from hybridrl.config.foreign_files import read_mapping
from hybridrl.config.schema import ActorRolloutRefConfig, CriticConfig, DataConfig, ModelConfig, SFTTrainerConfig
from hybridrl.config.schema_algorithm import RewardConfig
from hybridrl.config.schema_rollout import RolloutConfig
from hybridrl.core.algorithms import Algorithm
from hybridrl.core.required import required
from hybridrl.core.training.worker_group import TrainWorkers
from hybridrl.data.rows import fingerprinted_files
from hybridrl.runs.plugins import load
from hybridrl.tracking.console import info

SCRIPT = re.compile(r"(.+\.py)(?::\w+)?")  # with the name of a function or without
RESETTABLE = ("optimizer", "schedule")
DIRECTORY = "trainer.default_local_dir"
MOST_CHANGED = 5  # values that a message names
LEARNED = ("trainer.seed", "trainer.critic_warmup")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Identity:
    """Fingerprints by which a run, its data, and the models under adapters (by their keys) are recognised."""

    data: str
    run: str
    bases: dict[str, str]

    def state(self) -> dict[str, Any]:
        """What every checkpoint of the run says of it."""
        return {"fingerprint": self.run, "data": self.data, "bases": self.bases, "code": code_fingerprint()}


@dataclass(frozen=True)
class ResumePlan:
    """What a run resumes from, if anything, and how many steps it has.

    `contents` are the parts read of each model in the checkpoint. `total_prompts` ends a run that has no fixed number
    of steps, in which dynamic sampling may use up the prompts earlier.
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
    config: PPOConfig, algorithm: Algorithm, rows: int, epoch: int, directory: Path, say: Say = info
) -> ResumePlan:
    """Plan a reinforcement learning run over data with `rows` rows, of which an epoch has `epoch` prompts.

    Writes nothing. Raises ConfigError if a checkpoint and the configuration do not go together.
    """
    trainer, section, critic = config.trainer, config.actor_rollout_ref, config.critic
    models = adapted_models(section.model, critic.model if algorithm.uses_critic else None)
    identity = identify(config.data, section.model.path, config.algorithm.adv_estimator, models, rows)

    def from_verl(saved: Checkpoint) -> Checkpoint:
        known = {"prompts_per_step": config.data.train_batch_size, "rows": epoch, "data": identity.data}
        weight = config.algorithm.kl_ctrl.kl_coef
        return replace(
            saved,
            state=load("verl.checkpoint").state_from_verl(saved.step, saved.path, **known, kl_weight=weight, log=say),
        )

    saved = find_checkpoint(trainer, asdict(config), directory, identity, from_verl, say)
    actor = section.actor.checkpoint
    wanted = {"actor": actor.load_contents, "critic": critic.checkpoint.load_contents, "reference": ["model"]}
    wanted = {name: wanted[name] for name in contents_to_save(section, critic, algorithm)}
    contents = contents_to_load(trainer, wanted, saved.path, say) if saved else {}
    plan = ResumePlan(identity, saved, contents, trainer.total_training_steps or 0)
    if plan.steps:
        return plan
    # Without a fixed number of steps, the last one takes what prompts are left, however few.
    total, size = trainer.total_epochs * epoch, config.data.train_batch_size
    counted = not config.algorithm.filter_groups.enable  # its steps use up as many prompts as they need
    rest = (total - plan.prompts_used) % size if counted else 0
    if rest and config.data.drop_last:
        total -= rest
    elif rest:
        say(f"the last step has {rest} prompts instead of {size}; data.drop_last=true leaves them out")
    steps = plan.done - (plan.prompts_used - total) // size
    return replace(plan, steps=steps, total_prompts=total)


def check_complete(config: PPOConfig | SFTConfig, plan: ResumePlan, directory: Path) -> bool:
    """Return whether all steps of the run in this directory are done.

    Raises ConfigError if they are and the configuration is another one: nothing would be trained with it.
    """
    if plan.checkpoint is None or plan.done < plan.steps:
        return False
    changed = _changed_values(config, directory / "config.yaml")
    if plan.checkpoint.path.parent == directory and changed:
        raise ConfigError(
            f"{DIRECTORY}={directory}: the run there is complete ({plan.done} of {plan.steps} steps), with "
            f"{'; '.join(changed[:MOST_CHANGED])}",
            fix=f"set another {DIRECTORY} for a new run, or higher trainer.total_training_steps to continue this one",
            keys=DIRECTORY,
        )
    return True


def _changed_values(config: PPOConfig | SFTConfig, file: Path) -> list[str]:
    """What differs from the configuration in a file; of the section `trainer` only what changes what is learned."""
    if not file.exists():
        return []
    try:
        before, now = flatten(read_mapping(file)), flatten(yaml.safe_load(as_yaml(config)))
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read: {error}", fix=f"set another {DIRECTORY}", keys=DIRECTORY) from error
    counted = [key for key in now if key in LEARNED or not key.startswith(("trainer.", "eval."))]
    changed = [key for key in counted if key in before and before[key] != now[key]]
    return [f"{key}={before[key]}, not {now[key]}" for key in changed]


def identify(data: DataConfig, model: str, estimator: str, adapted: Mapping[str, ModelConfig], rows: int) -> Identity:
    """The identity of a reinforcement learning run; `adapted` are the models with an adapter, by their keys."""
    data_print = data_fingerprint(fingerprinted_files(data), rows, data.prompt_key, data.train_max_samples)
    run = fingerprint(data_print, model, estimator)
    bases = {f"{key}.path": model_fingerprint(model.path) for key, model in adapted.items()}
    return Identity(data_print, run, bases)


def engine_fingerprint(model: ModelConfig, rollout: RolloutConfig) -> str:
    """The fingerprint of what determines a response besides its request and the weights."""
    return fingerprint(rollout.dtype, asdict(rollout.engine_kwargs), model.override_config, model.lora_alpha)


def score_fingerprint(reward: RewardConfig, data: str) -> str:
    """The fingerprint of what determines a score besides the response. Of custom reward functions the files count, not
    what these import or read."""
    return fingerprint(asdict(reward), reward_code(reward), data, code_fingerprint())


def reward_code(reward: RewardConfig) -> list[str]:
    """The hashes of the files that custom reward functions are in."""
    scripts = (SCRIPT.fullmatch(str(value)) for value in flatten(asdict(reward)).values())
    return [hashlib.sha256(script_path(script[1]).read_bytes()).hexdigest() for script in scripts if script]


def adapted_models(policy: ModelConfig, critic: ModelConfig | None) -> dict[str, ModelConfig]:
    """The models that are trained through an adapter, by their keys."""
    models = {"actor_rollout_ref.model": policy, "critic.model": critic}
    return {key: model for key, model in models.items() if model is not None and model.lora_rank}


def find_checkpoint(
    trainer: SFTTrainerConfig,
    settings: dict[str, Any],
    directory: Path,
    identity: Identity,
    from_verl: Callable[[Checkpoint], Checkpoint] | None = None,
    say: Say = info,
) -> Checkpoint | None:
    """The checkpoint to resume from, if any; `from_verl` gives one of verl's the state that it lacks (None: rejected).

    Raises ConfigError if it and the run's `settings`, its configuration, do not go together.
    """
    saved = select_checkpoint(trainer.resume_mode, trainer.resume_from_path, directory, identity.run, say)
    if saved is None:
        return None
    if is_verl(saved.path) and from_verl is None:
        fix = f"to start from its weights: trainer.resume_mode=disable model.path={saved.path}/actor"
        raise ConfigError(f"{saved.path} is a verl checkpoint; SFT cannot resume from it", fix=fix)
    if is_verl(saved.path):
        saved = required(from_verl)(saved)
    allowed = trainer.resume_allow, trainer.reset_optimizer
    check_compatible(saved, settings, identity.data, *allowed, say, identity.bases)
    return saved


def contents_to_save(
    section: ActorRolloutRefConfig, critic: CriticConfig, algorithm: Algorithm
) -> dict[str, list[str]]:
    """The parts saved of each model: a reference has a state of its own only if it is refreshed."""
    contents = {"actor": section.actor.checkpoint.save_contents}
    if algorithm.uses_critic:
        contents["critic"] = critic.checkpoint.save_contents
    if algorithm.uses_reference and section.ref.refresh_freq > 0:
        contents["reference"] = ["model"]
    return contents


def contents_to_load(
    trainer: SFTTrainerConfig, wanted: dict[str, list[str]], checkpoint: Path, say: Say = info
) -> dict[str, list[str]]:
    """The parts read of each model in a checkpoint. Raises ConfigError if one is missing or cannot be read."""
    kept = {"model"} if resets_optimizer(trainer) else {"model", "optimizer", "extra"}
    contents = {}
    for name, parts in wanted.items():
        if name == "reference" and not (checkpoint / name).is_dir():
            say(f"{checkpoint} has no reference: it starts from actor_rollout_ref.ref.model.path")
            continue
        contents[name] = [part for part in parts if part in kept]
        check_parts(checkpoint / name, contents[name])
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
    """Whether moments are left behind: those of another type of optimizer are of no use, even if it was allowed."""
    return trainer.reset_optimizer or any(key.endswith("optim.optimizer") for key in trainer.resume_allow)
