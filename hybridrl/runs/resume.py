"""Going on from a saved step: which one, what is read of it, and into what it is put."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hybridrl.algorithms import Algorithm
from hybridrl.checkpoint.read import check_parts
from hybridrl.checkpoint.resume import data_fingerprint, fingerprint, model_fingerprint, what_was_restored
from hybridrl.checkpoint.resume.select import agree, saved_step
from hybridrl.checkpoint.resume.verl import NO_KL_WEIGHT, NOT_FROM_VERL, state_from_verl
from hybridrl.checkpoint.saved import Saved, is_of_verl
from hybridrl.config import PPOConfig
from hybridrl.config.compose import as_dict
from hybridrl.config.schema import ModelConfig
from hybridrl.data.files import files_that_count
from hybridrl.run_state import RunState
from hybridrl.tracking.log import info
from hybridrl.training.worker_group import TrainWorkers

RESETTABLE = ("optimizer", "schedule")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Identity:
    """What data, run, and the models that adapters are trained on (by their keys) are recognised by."""

    data: str
    run: str
    bases: dict[str, str]


@dataclass(frozen=True)
class Course:
    """From where to where a run goes: on from `saved`, of which `contents` is read, until `steps` steps are done.

    `prompts_in_all`: those that the run takes, where no number of steps is set.
    """

    identity: Identity
    saved: Saved | None
    contents: dict[str, list[str]]
    prompts_in_all: int | None
    steps: int

    @property
    def done(self) -> int:
        return self.saved.step if self.saved else 0


def chart_course(
    config: PPOConfig, algorithm: Algorithm, rows: int, epoch: int, directory: Path, say: Say = info
) -> Course:
    """`epoch`: prompts of one, of data with so many rows. Writes nothing.

    ConfigError where a saved step and the configuration do not go together.
    """
    trainer, identity = config.trainer, identify(config, algorithm, rows)
    saved = find_saved_step(config, directory, identity, epoch, say)
    contents = contents_to_load(config, algorithm, saved.path, say) if saved else {}
    done, used = (saved.step, saved.state["prompts"]) if saved else (0, 0)
    # Without a number of steps the last one takes what prompts are left.
    in_all = None if trainer.total_training_steps else trainer.total_epochs * epoch
    steps = trainer.total_training_steps or done - (used - in_all) // config.data.train_batch_size
    return Course(identity, saved, contents, in_all, steps)


def identify(config: PPOConfig, algorithm: Algorithm, rows: int) -> Identity:
    data, model = config.data, config.actor_rollout_ref.model.path
    rows_of = data_fingerprint(files_that_count(data), rows, data.prompt_key, data.train_max_samples)
    run = fingerprint(rows_of, model, config.algorithm.adv_estimator)
    bases = {f"{key}.path": model_fingerprint(model.path) for key, model in adapted_models(config, algorithm).items()}
    return Identity(rows_of, run, bases)


def adapted_models(config: PPOConfig, algorithm: Algorithm) -> dict[str, ModelConfig]:
    """The models that are trained through an adapter, by their keys."""
    models = {"actor_rollout_ref.model": config.actor_rollout_ref.model}
    if algorithm.uses_critic:
        models["critic.model"] = config.critic.model
    return {key: model for key, model in models.items() if model.lora_rank}


def find_saved_step(config: PPOConfig, directory: Path, identity: Identity, epoch: int, say: Say) -> Saved | None:
    """The step to go on from, if there is one. ConfigError where it and the configuration do not go together."""
    trainer = config.trainer
    saved = saved_step(trainer.resume_mode, trainer.resume_from_path, directory, identity.run, say)
    if saved is None:
        return None
    if is_of_verl(saved.path):
        told = {
            "prompts_per_step": config.data.train_batch_size,
            "rows": epoch,
            "data": identity.data,
            "kl_weight": config.algorithm.kl_ctrl.kl_coef,
        }
        saved = replace(saved, state=state_from_verl(saved.step, saved.path, **told, say=say))
    allowed = trainer.resume_allow, trainer.reset_optimizer
    agree(saved, as_dict(config), identity.data, *allowed, say, identity.bases)
    return saved


def contents_to_save(config: PPOConfig, algorithm: Algorithm) -> dict[str, list[str]]:
    """The parts of each model that has a state of its own: a reference has one only where it is refreshed."""
    contents = {"actor": config.actor_rollout_ref.actor.checkpoint.save_contents}
    if algorithm.uses_critic:
        contents["critic"] = config.critic.checkpoint.save_contents
    if algorithm.uses_reference and config.actor_rollout_ref.ref.refresh_freq > 0:
        contents["reference"] = ["model"]
    return contents


def contents_to_load(config: PPOConfig, algorithm: Algorithm, step: Path, say: Say) -> dict[str, list[str]]:
    """What is read of each model in a saved step. ConfigError where it is not there, or cannot be read."""
    actor, critic = config.actor_rollout_ref.actor.checkpoint, config.critic.checkpoint
    wanted = {"actor": actor.load_contents, "critic": critic.load_contents, "reference": ["model"]}
    kept = {"model"} if resets(config) else {"model", "optimizer", "extra"}
    contents = {}
    for name in contents_to_save(config, algorithm):
        if name == "reference" and not (step / name).is_dir():
            say(f"{step} holds no reference: it begins as actor_rollout_ref.ref.model.path has it")
            continue
        contents[name] = [part for part in wanted[name] if part in kept]
        check_parts(step / name, contents[name])
    return contents


def restore(
    config: PPOConfig, saved: Saved, contents: dict[str, list[str]], workers: TrainWorkers, state: RunState, rows: int
) -> None:
    """Put a saved step's state into workers and driver, and say what was restored."""
    updates = workers.load(saved.path, contents)
    state.put(saved.state)
    state.records.forget_after(saved.step)
    of_verl, in_reward = is_of_verl(saved.path), config.algorithm.use_kl_in_reward
    missing: dict[str, str] = {}
    if resets(config):
        missing |= {f"{what} of {name}": "trainer.reset_optimizer" for name in updates for what in RESETTABLE}
    if of_verl:
        missing |= NOT_FROM_VERL | (NO_KL_WEIGHT if in_reward else {})
    told = what_was_restored(
        saved.path,
        saved.step,
        weights=[name for name, parts in contents.items() if "model" in parts],
        optimizers=[name for name, parts in contents.items() if "optimizer" in parts],
        updates={name: count for name, count in updates.items() if "extra" in contents[name]},
        prompts=saved.state["prompts"],
        rows=rows,
        kl_weight=saved.state["kl_weight"] if in_reward and not of_verl else None,
        trackers=[] if of_verl else ["metrics.jsonl", *sorted(saved.state["sinks"])],
        missing=missing,
    )
    info(told)


def resets(config: PPOConfig) -> bool:
    """Moments of another type of optimizer are of no use, whoever allowed it."""
    return config.trainer.reset_optimizer or any(key.endswith("optim.optimizer") for key in config.trainer.resume_allow)
