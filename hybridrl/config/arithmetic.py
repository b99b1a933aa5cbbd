"""How many samples and updates a step has, in one line."""

from hybridrl.config.schema import PPOConfig


def batch_arithmetic(config: PPOConfig) -> str:
    """Of a settled configuration: `1024 prompts x 5 answers = 5120 samples a step, 4 mini-batches of ...`"""
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    prompts, answers = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    devices, size = (trainer.n_gpus_per_node or 1) * trainer.nnodes, actor.ppo_mini_batch_size
    updates, uneven = -(-prompts // size), prompts % size > 0
    by_tokens = actor.use_dynamic_bsz or actor.ppo_micro_batch_size_per_gpu is None
    return (
        f"{prompts} prompts x {answers} answers = {prompts * answers} samples a step, "
        f"{updates} mini-batch{'es' * (updates > 1)} of {'up to ' * uneven}{size} prompts "
        f"({size * answers} samples on {devices} device{'s' * (devices > 1)})"
        + (f" x {actor.ppo_epochs} epochs" if actor.ppo_epochs > 1 else "")
        + ", in passes of up to "
        + (f"{actor.ppo_max_token_len_per_gpu} tokens" if by_tokens else f"{actor.ppo_micro_batch_size_per_gpu} rows")
        + " a device"
    )
