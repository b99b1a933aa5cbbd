"""Attempts of a run: again after a worker's death, with smaller micro-batches after a lack of memory, and with half the
learning rate after a diagnosis that the user wants to be answered so.

An attempt is a complete run, which resumes from the last checkpoint. A lack of memory needs one, too: the rank that has
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
HARMLESS = "which changes nothing but memory and time"


class Sizes(NamedTuple):
    """The keys that size the micro-batches of a call (`rows` where `by_tokens` is false, else `tokens`), and switches
    that free memory once each has a single row. None of them changes what is learned."""

    tokens: str
    rows: str | None
    by_tokens: str | None
    switches: tuple[str, ...]


POLICY = (f"{ACTOR}.fsdp_config.optimizer_offload", f"{ACTOR}.fsdp_config.param_offload")
CRITIC = ("critic.fsdp.optimizer_offload", "critic.fsdp.param_offload")
PPO_SIZES = {
    "update_policy": Sizes(
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        f"{ACTOR}.use_dynamic_bsz",
        ("actor_rollout_ref.model.enable_gradient_checkpointing", *POLICY),
    ),
    "log_probs": Sizes(
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        f"{ROLLOUT}.log_prob_use_dynamic_bsz",
        POLICY,
    ),
    "reference_log_probs": Sizes(
        f"{REF}.log_prob_max_token_len_per_gpu",
        f"{REF}.log_prob_micro_batch_size_per_gpu",
        f"{REF}.log_prob_use_dynamic_bsz",
        (f"{REF}.fsdp_config.param_offload", *POLICY),
    ),
    "values": Sizes(
        "critic.forward_max_token_len_per_gpu",
        "critic.forward_micro_batch_size_per_gpu",
        "critic.use_dynamic_bsz",
        (*CRITIC, *POLICY),
    ),
    "update_critic": Sizes(
        "critic.ppo_max_token_len_per_gpu",
        "critic.ppo_micro_batch_size_per_gpu",
        "critic.use_dynamic_bsz",
        ("critic.model.enable_gradient_checkpointing", *CRITIC, *POLICY),
    ),
}
SFT_SWITCHES = ("model.enable_gradient_checkpointing", "engine.fsdp_config.optimizer_offload")
SFT_SIZES = {"update_policy": Sizes("data.max_token_len_per_gpu", None, None, SFT_SWITCHES)}


def with_restarts(attempt: Callable[[Adjusted], None], config: Config) -> None:
    """Make the attempt; again from its last checkpoint if a worker dies, `trainer.max_restarts` times, if memory lacks
    as often as there is a smaller setting, and a few times if a diagnosis rolls the run back.

    An attempt that ends before its first checkpoint is repeated as it began, for example from an explicit path, which
    `resume_mode=auto` need not find.
    """
    trainer, directory = config.trainer, Path(config.trainer.default_local_dir).expanduser()
    adjusted, restarts_left, rollbacks_left = adjusted_before(config), trainer.max_restarts, ROLLBACKS
    resumes = trainer.resume_mode == "auto"  # as a driver does that is started again
    if guard.before:
        restarts_left = guard.before.restarts_left
        record(RESTART, f"{guard.before.ended}\n(restarts left: {restarts_left})")
    while True:
        guard.may_restart(restarts_left * resumes)
        before = list_checkpoints(directory)
        try:
            return attempt(adjusted)
        except (WorkerDied, ScorerDied) as death:
            if isinstance(death, OutOfMemory) and (key := lower(config, death, adjusted)):
                warn(
                    f"{death}\nstarting again from the last checkpoint with {described(key, adjusted)}, {HARMLESS}",
                    RESTART,
                )
            elif restarts_left:
                restarts_left -= 1
                record(RESTART, f"{death}\n(restarts left: {restarts_left})")
                info(f"{death}\nrestarting the workers from the last checkpoint (restarts left: {restarts_left})")
            elif isinstance(death, OutOfMemory):
                raise exhausted(death, adjusted) from None
            else:
                raise
        except Unhealthy as diagnosis:
            healthy = [one.step for one in list_checkpoints(directory) if one.state["healthy"]]
            if not (diagnosis.rollback and healthy and rollbacks_left):
                raise
            rollbacks_left -= 1
            key = "optim.lr" if isinstance(config, SFTConfig) else f"{ACTOR}.optim.lr"
            adjust(config, key, _get(config, key) / 2, adjusted)
            warn(f"{diagnosis}\nback to step {healthy[-1]}, and on with {described(key, adjusted)}", RESTART)
        if list_checkpoints(directory) != before:
            trainer.resume_mode = "auto"


def lower(config: Config, lack: OutOfMemory, adjusted: Adjusted) -> str | None:
    """Change the one setting of the configuration that lets the call take less memory, and note it in `adjusted`;
    returns its key, None if there is none."""
    sizes = (SFT_SIZES if isinstance(config, SFTConfig) else PPO_SIZES).get(lack.call.rpartition(".")[2])
    candidates = smaller(config, sizes, lack.tokens) if sizes else {}
    if not candidates:
        return None
    key, value = next(iter(candidates.items()))
    adjust(config, key, value, adjusted)
    return key


def adjust(config: Config, key: str, value: Any, adjusted: Adjusted) -> None:
    """Set a key, and note it with the value that was configured."""
    adjusted[key] = [adjusted.get(key, [_get(config, key)])[0], value]
    _set(config, key, value)


def exhausted(lack: OutOfMemory, adjusted: Adjusted) -> OutOfMemory:
    """Return the error of a run for which nothing is left to lower."""
    tried = "".join(f"\ntried: {described(key, adjusted)}" for key in adjusted if not key.endswith(".lr"))
    fix = "take more devices, a smaller model or an adapter (lora_rank=32); python -m hybridrl.doctor plans the memory"
    return OutOfMemory(f"{lack}{tried}\nno setting is left that would take less memory here: {fix}", lack.call)


def smaller(config: Config, sizes: Sizes, tokens: int | None) -> dict[str, Any]:
    """Return settings that take less memory, by key, in the order in which to try them; `tokens` are those of the
    largest micro-batch, None if it is one row."""
    values: dict[str, Any] = {}
    rows = _get(config, sizes.rows) if sizes.rows and not _get(config, sizes.by_tokens) else None
    if rows and rows > 1:
        values[sizes.rows] = rows // 2
    elif not rows and tokens:
        values[sizes.tokens] = min(_get(config, sizes.tokens), tokens) // 2
    on_cpu = config.trainer.device == "cpu"
    switches = (key for key in sizes.switches if not (on_cpu and key.endswith("_offload")))  # has no effect there
    return values | {key: True for key in switches if not _get(config, key)}


def adjusted_before(config: Config) -> Adjusted:
    """Set what was adjusted in an earlier run, as the checkpoint to resume from has it, unless it is configured
    otherwise since; returns it."""
    trainer = config.trainer
    found = None
    if trainer.resume_mode == "resume_path":
        found = read_checkpoint(Path(trainer.resume_from_path).expanduser())
    elif trainer.resume_mode == "auto":
        found = next(reversed(list_checkpoints(Path(trainer.default_local_dir).expanduser())), None)
    saved = found.state.get("adjusted", {}) if found else {}
    adjusted = {key: values for key, values in saved.items() if _get(config, key) == values[0]}
    for key, (_, value) in adjusted.items():
        _set(config, key, value)
        warn(f"as adjusted earlier in this run, it continues with {described(key, adjusted)}")
    return adjusted


def described(key: str, adjusted: Adjusted) -> str:
    before, now = (str(value).lower() for value in adjusted[key])
    return f"{key}={now} instead of {before}"


def _get(config: Config, key: str) -> Any:
    return attrgetter(key)(config)


def _set(config: Config, key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    setattr(attrgetter(section)(config), name, value)
