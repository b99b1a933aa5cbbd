"""Repeated attempts of a run: after a worker's death, with smaller micro-batches after an out-of-memory error, and with
half the learning rate after a diagnosis with the configured action rollback.

An attempt is a complete run, which resumes from the last checkpoint. Out of memory needs a new attempt, too: the rank
without memory raises in the middle of a collective, in which the other ranks wait for it and cannot be interrupted.
"""

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from hybridrl.checkpoint.store import read_checkpoint, resumable
from hybridrl.config import SFTConfig, TrainingConfig
from hybridrl.core.cluster import OutOfMemory, WorkerDied
from hybridrl.core.rollout.ladder import EngineOutOfMemory
from hybridrl.health import Unhealthy
from hybridrl.plugins import load
from hybridrl.rewards.process import ScorerDied
from hybridrl.runtime import guard
from hybridrl.tracking.console import info, warn
from hybridrl.tracking.faults import KILLED, RESTART, record

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
        if checkpoint is None and trainer.resume_mode != "disable" and trainer.resume_from_path:
            checkpoint = read_checkpoint(Path(trainer.resume_from_path).expanduser())
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
            trainer.resume_mode, trainer.resume_from_path = "auto", None
