"""Resuming: selection of the checkpoint, and loading of its parts. And repeated attempts of a run: after a worker's
death, with smaller micro-batches after an out-of-memory error, and with half the learning rate after a diagnosis with
the configured action rollback.

An attempt is a complete run, which resumes from the last checkpoint. Out of memory needs a new attempt, too: the rank
without memory raises in the middle of a collective, in which the other ranks wait for it and cannot be interrupted.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

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
    read_checkpoint,
    resumable,
    step_directories,
    step_number,
)
from hybridrl.config import ConfigError, PPOConfig, SFTConfig, TrainingConfig
from hybridrl.config.compose import as_yaml
from hybridrl.config.files import read_mapping
from hybridrl.config.schema import SFTTrainerConfig
from hybridrl.core.algorithms import Algorithm
from hybridrl.core.cluster import OutOfMemory, WorkerDied
from hybridrl.core.rollout.ladder import EngineOutOfMemory
from hybridrl.core.training.worker_group import TrainWorkers
from hybridrl.data.processor import version_change
from hybridrl.data.row_files import fingerprinted_files
from hybridrl.health import Unhealthy
from hybridrl.plugins import load
from hybridrl.rewards.process import ScorerDied
from hybridrl.runs.models import run_models
from hybridrl.runs.settings import contents_to_save
from hybridrl.runtime import guard
from hybridrl.tracking.console import info, warn
from hybridrl.tracking.faults import KILLED, RESTART, record

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

    Raises ConfigError if it is not compatible with the run's `settings`, which are its configuration.
    """
    mode, begin = trainer.resume_mode, Path(trainer.resume_from_path or "").expanduser()
    continues = mode == "auto" and trainer.resume_from_path is not None
    if continues and not step_directories(directory) and begin.parent.resolve() != directory.resolve():
        mode = "resume_path"  # of another run; from its first own checkpoint on, the run resumes from that
    saved = select_checkpoint(mode, trainer.resume_from_path, directory, identity.run, say)
    if continues and mode == "auto" and (saved is None or saved.step < step_number(begin)):
        at = f"step {saved.step}" if saved else "no step"
        cause = (
            f"{trainer.experiment_name} continues from {begin.name} (trainer.resume_from_path), and {directory} is at "
        )
        raise ConfigError(
            f"{cause}{at}", fix="first run what trains up to there, or leave trainer.resume_from_path out"
        )
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


# -- attempts ----------------------------------------------------------------------------------------------------------


ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"

Adjusted = dict[str, list]  # by key, the configured value and the one used instead

ROLLBACKS = 3  # at most


class Sizes(NamedTuple):
    """The keys for the size of a call's micro-batches (`rows` if `by_tokens` is false, else `tokens`), and switches
    that free memory once each micro-batch has a single row. None of them affects learning."""

    tokens: str
    rows: str | None
    by_tokens: str | None
    switches: tuple[str, ...]


def _sizes(section: str, micro_batch: str, by_tokens: str, *switches: str) -> Sizes:
    """Return the keys of a section for a kind of micro-batch: ppo_max_token_len_per_gpu and so on."""
    tokens, rows = f"{micro_batch}_max_token_len_per_gpu", f"{micro_batch}_micro_batch_size_per_gpu"
    return Sizes(f"{section}.{tokens}", f"{section}.{rows}", f"{section}.{by_tokens}", switches)


POLICY = (f"{ACTOR}.fsdp_config.optimizer_offload", f"{ACTOR}.fsdp_config.param_offload")
CRITIC = ("critic.fsdp.optimizer_offload", "critic.fsdp.param_offload", *POLICY)
CHECKPOINTING = "model.enable_gradient_checkpointing"
DYNAMIC = "log_prob_use_dynamic_bsz"
PPO_SIZES = {
    "update_policy": _sizes(ACTOR, "ppo", "use_dynamic_bsz", f"actor_rollout_ref.{CHECKPOINTING}", *POLICY),
    "forward actor": _sizes(ROLLOUT, "log_prob", DYNAMIC, *POLICY),
    "forward reference": _sizes(REF, "log_prob", DYNAMIC, f"{REF}.fsdp_config.param_offload", *POLICY),
    "update_critic": _sizes("critic", "ppo", "use_dynamic_bsz", f"critic.{CHECKPOINTING}", *CRITIC),
    "forward critic": _sizes("critic", "forward", "use_dynamic_bsz", *CRITIC),
}
SFT_SWITCHES = (CHECKPOINTING, "engine.fsdp_config.optimizer_offload")
SFT_SIZES = {"update_policy": Sizes("data.max_token_len_per_gpu", None, None, SFT_SWITCHES)}


class Adjustments:
    """Settings that a run has changed by itself, with the configured values; `made` is in every checkpoint."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config, self.made = config, Adjusted()
        supervised = isinstance(config, SFTConfig)
        self.sizes, self.lr = (SFT_SIZES, "optim.lr") if supervised else (PPO_SIZES, f"{ACTOR}.optim.lr")

    def value(self, key: str) -> Any:
        return attrgetter(key)(self.config)

    def set(self, key: str, value: Any) -> None:
        """Change a setting, and note it with the value that was configured."""
        self.made[key] = [self.made.get(key, [self.value(key)])[0], value]
        section, _, name = key.rpartition(".")
        setattr(attrgetter(section)(self.config), name, value)

    def described(self, key: str) -> str:
        before, now = (str(value).lower() for value in self.made[key])
        return f"{key}={now} instead of {before}"

    def resume(self) -> None:
        """Apply the adjustments in the checkpoint to resume from, except for keys that were configured differently
        since."""
        trainer, checkpoint = self.config.trainer, None
        if trainer.resume_mode == "auto":
            checkpoint = next(reversed(resumable(Path(trainer.default_local_dir).expanduser())), None)
        if checkpoint is None and trainer.resume_mode != "disable":
            checkpoint = read_checkpoint(Path(trainer.resume_from_path or "").expanduser())
        for key, (before, now) in (checkpoint.state.get("adjusted", {}) if checkpoint else {}).items():
            if self.value(key) == before:
                self.set(key, now)
                warn(f"as adjusted earlier in this run, it continues with {self.described(key)}")

    def lower(self, error: OutOfMemory) -> str | None:
        """Change one setting so that the call takes less memory; returns its key, None if no setting is left."""
        method = error.call.rpartition(".")[2]
        sizes = self.sizes.get(f"forward {error.model}" if method == "forward" else method)
        for key, value in (self.smaller(sizes, error.tokens) if sizes else {}).items():
            self.set(key, value)
            return key
        return None

    def smaller(self, sizes: Sizes, tokens: int | None) -> dict[str, Any]:
        """Return settings with a smaller memory use, by key, in the order of trial; `tokens` is the size of the largest
        micro-batch, None if it is one row."""
        values: dict[str, Any] = {}
        rows = self.value(sizes.rows) if sizes.rows and not self.value(sizes.by_tokens) else None
        if rows and rows > 1:
            values[sizes.rows] = rows // 2
        elif not rows and tokens:
            values[sizes.tokens] = min(self.value(sizes.tokens), tokens) // 2
        on_cpu = self.config.trainer.device == "cpu"  # where offloading has no effect
        switches = (key for key in sizes.switches if not (on_cpu and key.endswith("_offload")))
        return values | {key: True for key in switches if self.value(key) not in (True, None)}

    def exhausted(self, error: Exception) -> OutOfMemory:
        """Return the error of a run without a further setting to lower, or of one that is killed though its plan
        fits."""
        tried = "".join(f"\ntried: {self.described(key)}" for key in self.made if key != self.lr)
        lacks = (load("room")(self.config).lack(saving=False, share=tenths / 10) for tenths in range(10, 4, -1))
        fix = "take more devices, a smaller model or an adapter (lora_rank=32); hybridrl doctor plans it"
        fix = next((lack.rpartition("; ")[2] for lack in lacks if lack), fix)
        return OutOfMemory(f"{error}{tried}\nno setting is left that is lowered without being asked: {fix}", "")


def with_restarts(attempt: Callable[[Adjusted], None], config: TrainingConfig) -> None:
    """Make the attempt, and repeat it from its last checkpoint: after a worker's death `trainer.max_restarts` times,
    after an out-of-memory error while there is a smaller setting, and after a few rollbacks. Two kills for memory end
    it. An attempt that ends before its first resumable checkpoint is repeated as it began, for example from an explicit
    path that `resume_mode=auto` would not find."""
    trainer, directory = config.trainer, Path(config.trainer.default_local_dir).expanduser()
    adjustments, restarts_left, rollbacks_left = Adjustments(config), trainer.max_restarts, ROLLBACKS
    adjustments.resume()
    resumes, kills = trainer.resume_mode == "auto", 0  # a driver that is started again then resumes
    if guard.before:
        restarts_left = guard.before.restarts_left
        record(RESTART, f"{guard.before.ended}\n(restarts left: {restarts_left})")
    while True:
        guard.may_restart(restarts_left * resumes)
        before = resumable(directory)
        try:
            return attempt(adjustments.made)
        except (WorkerDied, ScorerDied, EngineOutOfMemory) as death:
            restored = resumable(directory) if trainer.resume_mode == "auto" else resumable(directory) != before
            source = "from the last checkpoint" if restored else "as the run began, without a checkpoint,"
            kills += (1 + isinstance(death, EngineOutOfMemory)) * bool(KILLED.search(str(death)))  # it was built again
            if kills > 1:
                raise adjustments.exhausted(death) from None
            if isinstance(death, OutOfMemory) and (key := adjustments.lower(death)):
                change = f"starting again {source} with {adjustments.described(key)}"
                warn(f"{death}\n{change}, which changes nothing but memory and time", RESTART)
            elif restarts_left and not isinstance(death, EngineOutOfMemory):
                restarts_left -= 1
                record(RESTART, f"{death}\n(restarts left: {restarts_left})")
                info(f"{death}\nrestarting the workers {source} (restarts left: {restarts_left})")
            elif isinstance(death, OutOfMemory) or kills:
                raise adjustments.exhausted(death) from None
            else:
                raise
        except Unhealthy as diagnosis:
            healthy = [saved.step for saved in resumable(directory) if saved.state["healthy"]]
            if not (diagnosis.rollback and healthy and rollbacks_left):
                raise
            rollbacks_left -= 1
            adjustments.set(adjustments.lr, adjustments.value(adjustments.lr) / 2)
            changed = adjustments.described(adjustments.lr)
            warn(f"{diagnosis}\nback to step {healthy[-1]}, and on with {changed}", RESTART)
        if resumable(directory) != before:
            trainer.resume_mode = "auto"
