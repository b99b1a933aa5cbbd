"""Sizes of passes that are given over all devices, an older form: turned into rows a device, which is what counts."""

from collections.abc import Callable

from hybridrl.config.error import Refusals
from hybridrl.config.schema import PPOConfig

Note = Callable[[str], None]


def settle_micro_batches(config: PPOConfig, note: Note, wrong: Refusals) -> None:
    """Every `..._micro_batch_size` becomes `..._micro_batch_size_per_gpu`; both together are refused."""
    section, critic = config.actor_rollout_ref, config.critic
    devices = (config.trainer.n_gpus_per_node or 1) * config.trainer.nnodes
    for place, part, name in (
        ("actor_rollout_ref.actor", section.actor, "ppo_micro_batch_size"),
        ("actor_rollout_ref.ref", section.ref, "log_prob_micro_batch_size"),
        ("actor_rollout_ref.rollout", section.rollout, "log_prob_micro_batch_size"),
        ("critic", critic, "ppo_micro_batch_size"),
        ("critic", critic, "forward_micro_batch_size"),
    ):
        rows, one = vars(part)[name], f"{name}_per_gpu"
        if rows is None:
            continue
        if vars(part)[one] is not None:
            wrong.add(f"{place}.{name}={rows}: {one}={vars(part)[one]} is set too; set {one} alone")
            continue
        setattr(part, one, max(rows // devices, 1))
        setattr(part, name, None)
        note(
            f"{place}.{name}={rows} is now {place}.{one}={vars(part)[one]} (over {devices} device{'s' * (devices > 1)})"
        )
    critic.forward_micro_batch_size_per_gpu = (
        critic.forward_micro_batch_size_per_gpu or critic.ppo_micro_batch_size_per_gpu
    )
