"""Keys of verl that are computed from several, next to the table keys.yaml."""

import math
from collections.abc import Mapping
from typing import Any

from hybridrl.compat.entries import Entry, combined, number

MODE, BOUND = "trainer.v1.trainer_mode", "trainer.v1.sampler.max_off_policy_threshold"
BATCH, MINI = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
BYPASS = "algorithm.rollout_correction.bypass_mode"
STEPS, BATCHES = "async_training.trigger_parameter_sync_step", "async_training.require_batches"
ROLLOUT_STEPS = "actor_rollout_ref.rollout.total_rollout_steps"
STALENESS = "async_training.staleness_threshold"


def argument_of_reward(key: str) -> str:
    """The name of a key of the reward manager, which in verl passes further arguments to the reward function."""
    place = "reward.reward_kwargs."
    is_argument = key.startswith(place) and "overlong_buffer_cfg" not in key
    return key.replace(place, "reward.custom_reward_function.reward_kwargs.") if is_argument else key


def _batch_of_sync(step: Any, values: Mapping[str, Any]) -> str:
    """Name the batch with so many updates, unless verl does not read the key or it is the present one."""
    if values.get(MODE) != "separate_async":
        return ""
    try:
        batch = number(step) * number(values[MINI])
    except (TypeError, ValueError):
        return f"set {BATCH} and {MINI} to numbers"
    return "" if batch == values[BATCH] else f"set {BATCH}={batch}"


# A later one wins, and what the command or its file sets by hybridrl's name stays.
COMPUTED = [
    combined("async_training.partial_rollout", "", {MODE: "colocate_async"}, when="^(?i:true)$"),
    # One step off is all that it says by itself; fully_async says more.
    combined("actor_rollout_ref.hybrid_engine", "", {MODE: "separate_async", BOUND: 1, BYPASS: True}, silent=[True]),
    combined(
        f"{STEPS} {BATCHES} {STALENESS}",
        f"separate_async with bypass_mode, {BATCH} = trigger_parameter_sync_step x require_batches x "
        "ppo_mini_batch_size, over_sample_rate = staleness_threshold, max_off_policy_threshold = that rounded up",
        {
            MODE: "separate_async",
            BATCH: lambda of: of(STEPS, 4) * of(BATCHES, 1) * of(MINI),
            BOUND: lambda of: math.ceil(of(STALENESS, 0.1)),
            "actor_rollout_ref.rollout.over_sample_rate": lambda of: of(STALENESS, 0.1),
            BYPASS: True,
        },
        drops={BATCH: 0, "data.gen_batch_size": 1},
    ),
    combined(
        ROLLOUT_STEPS,
        "trainer.total_training_steps = its value / (trigger_parameter_sync_step x require_batches x "
        "ppo_mini_batch_size), rounded down",
        {"trainer.total_training_steps": lambda of: of(ROLLOUT_STEPS) // (of(STEPS, 4) * of(BATCHES, 1) * of(MINI))},
    ),
    combined(
        "async_training.use_rollout_log_probs actor_rollout_ref.actor.use_rollout_log_probs",
        f"{BYPASS} = its value",
        {BYPASS: lambda of: of.value},
    ),
    combined("async_training.compute_prox_log_prob", "", {BYPASS: False}, silent=[False]),
    Entry(
        "rejected",
        ["trainer.v1.separate_async.parameter_sync_step"],
        "weights are sent once per step, after data.train_batch_size / ppo_mini_batch_size updates",
        fix=_batch_of_sync,
    ),
]
