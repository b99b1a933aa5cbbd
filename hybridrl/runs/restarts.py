"""Attempts of a run: again after a worker's death, with smaller micro-batches after an out-of-memory error, and with
half the learning rate after a diagnosis whose configured action is a rollback.

An attempt is a complete run, which resumes from the last checkpoint. Out of memory needs one, too: the rank that has
too little raises in the middle of a collective, where the other ranks wait for it and cannot be called back.
"""

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from hybridrl.checkpoint.store import list_checkpoints, read_checkpoint
from hybridrl.config import PPOConfig, SFTConfig
from hybridrl.core.cluster import OutOfMemory, WorkerDied
from hybridrl.health import Unhealthy
from hybridrl.rewards.process import ScorerDied
from hybridrl.runtime import guard
from hybridrl.tracking.console import info, warn
from hybridrl.tracking.faults import RESTART, record

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"

Config = PPOConfig | SFTConfig
Adjusted = dict[str, list]  # by key, the configured value and the one used instead

ROLLBACKS = 3  # at most


class Sizes(NamedTuple):
    """The keys that size the micro-batches of a call (`rows` where `by_tokens` is false, else `tokens`), and switches
    that free memory once each has a single row. None of them changes what is learned."""

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
    "log_probs": _sizes(ROLLOUT, "log_prob", DYNAMIC, *POLICY),
    "reference_log_probs": _sizes(REF, "log_prob", DYNAMIC, f"{REF}.fsdp_config.param_offload", *POLICY),
    "update_critic": _sizes("critic", "ppo", "use_dynamic_bsz", f"critic.{CHECKPOINTING}", *CRITIC),
    "values": _sizes("critic", "forward", "use_dynamic_bsz", *CRITIC),
}
SFT_SWITCHES = (CHECKPOINTING, "engine.fsdp_config.optimizer_offload")
SFT_SIZES = {"update_policy": Sizes("data.max_token_len_per_gpu", None, None, SFT_SWITCHES)}


class Adjustments:
    """Settings that a run has changed by itself, with the configured values; `made` is in every checkpoint."""

    def __init__(self, config: Config) -> None:
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
        """Set what was adjusted in an earlier run, as the checkpoint to resume from has it, unless it is configured
        otherwise since."""
        trainer, checkpoint = self.config.trainer, None
        if trainer.resume_mode == "resume_path":
            checkpoint = read_checkpoint(Path(trainer.resume_from_path).expanduser())
        elif trainer.resume_mode == "auto":
            checkpoint = next(reversed(list_checkpoints(Path(trainer.default_local_dir).expanduser())), None)
        for key, (before, now) in (checkpoint.state.get("adjusted", {}) if checkpoint else {}).items():
            if self.value(key) == before:
                self.set(key, now)
                warn(f"as adjusted earlier in this run, it continues with {self.described(key)}")

    def lower(self, error: OutOfMemory) -> str | None:
        """Change the one setting with which the call takes less memory; returns its key, None if there is none."""
        sizes = self.sizes.get(error.call.rpartition(".")[2])
        for key, value in (self.smaller(sizes, error.tokens) if sizes else {}).items():
            self.set(key, value)
            return key
        return None

    def smaller(self, sizes: Sizes, tokens: int | None) -> dict[str, Any]:
        """Return settings that take less memory, by key, in the order in which to try them; `tokens` are those of the
        largest micro-batch, None if it is one row."""
        values: dict[str, Any] = {}
        rows = self.value(sizes.rows) if sizes.rows and not self.value(sizes.by_tokens) else None
        if rows and rows > 1:
            values[sizes.rows] = rows // 2
        elif not rows and tokens:
            values[sizes.tokens] = min(self.value(sizes.tokens), tokens) // 2
        on_cpu = self.config.trainer.device == "cpu"  # where offloading has no effect
        switches = (key for key in sizes.switches if not (on_cpu and key.endswith("_offload")))
        return values | {key: True for key in switches if not self.value(key)}

    def exhausted(self, error: OutOfMemory) -> OutOfMemory:
        """Return the error of a run for which nothing is left to lower."""
        tried = "".join(f"\ntried: {self.described(key)}" for key in self.made if key != self.lr)
        fix = "take more devices, a smaller model or an adapter (lora_rank=32); python -m hybridrl.doctor plans the "
        text = f"{error}{tried}\nno setting is left that would take less memory here: {fix}memory"
        return OutOfMemory(text, error.call)


def with_restarts(attempt: Callable[[Adjusted], None], config: Config) -> None:
    """Make the attempt; again from its last checkpoint if a worker dies, `trainer.max_restarts` times, after an
    out-of-memory error as often as there is a smaller setting, and a few times if a diagnosis rolls the run back.

    An attempt that ends before its first checkpoint is repeated as it began, for example from an explicit path, which
    `resume_mode=auto` need not find.
    """
    trainer, directory = config.trainer, Path(config.trainer.default_local_dir).expanduser()
    adjustments, restarts_left, rollbacks_left = Adjustments(config), trainer.max_restarts, ROLLBACKS
    adjustments.resume()
    resumes = trainer.resume_mode == "auto"  # as a driver does that is started again
    if guard.before:
        restarts_left = guard.before.restarts_left
        record(RESTART, f"{guard.before.ended}\n(restarts left: {restarts_left})")
    while True:
        guard.may_restart(restarts_left * resumes)
        before = list_checkpoints(directory)
        try:
            return attempt(adjustments.made)
        except (WorkerDied, ScorerDied) as death:
            if isinstance(death, OutOfMemory) and (key := adjustments.lower(death)):
                change = f"starting again from the last checkpoint with {adjustments.described(key)}"
                warn(f"{death}\n{change}, which changes nothing but memory and time", RESTART)
            elif restarts_left:
                restarts_left -= 1
                record(RESTART, f"{death}\n(restarts left: {restarts_left})")
                info(f"{death}\nrestarting the workers from the last checkpoint (restarts left: {restarts_left})")
            elif isinstance(death, OutOfMemory):
                raise adjustments.exhausted(death) from None
            else:
                raise
        except Unhealthy as diagnosis:
            healthy = [saved.step for saved in list_checkpoints(directory) if saved.state["healthy"]]
            if not (diagnosis.rollback and healthy and rollbacks_left):
                raise
            rollbacks_left -= 1
            adjustments.set(adjustments.lr, adjustments.value(adjustments.lr) / 2)
            changed = adjustments.described(adjustments.lr)
            warn(f"{diagnosis}\nback to step {healthy[-1]}, and on with {changed}", RESTART)
        if list_checkpoints(directory) != before:
            trainer.resume_mode = "auto"
