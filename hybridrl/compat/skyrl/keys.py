"""Keys of SkyRL that are computed from several, next to the table keys.yaml."""

import math

from hybridrl.compat.entries import Entry, combined
from hybridrl.compat.verl.keys import BOUND, BYPASS, MODE

ROLLOUT, ACTOR, CORRECTION = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "algorithm.rollout_correction"
STALENESS = "trainer.fully_async.max_staleness_steps"
OFF_POLICY = "trainer.algorithm.off_policy_correction"
LOW, HIGH = f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"


def _mask(metric: str, statistic: str, name: str, low: float, high: float) -> Entry:
    """A mask whose bounds are of the trainer's probability over the engine's; those of k1 are of the inverse."""
    least, most = f"{OFF_POLICY}.{name}_mask_low", f"{OFF_POLICY}.{name}_mask_high"
    return combined(
        f"{OFF_POLICY}.sequence_mask_metric",
        f"{CORRECTION}.rollout_rs={statistic}, between 1 / {name}_mask_high and 1 / {name}_mask_low",
        {
            f"{CORRECTION}.rollout_rs": statistic,
            f"{CORRECTION}.rollout_rs_threshold": lambda of: f"{1 / of(most, high):g}_{1 / of(least, low):g}",
        },
        when=f"^{metric}$",
    )


COMPUTED = [
    combined(
        "trainer.placement.colocate_all",
        "separate_async with a bound of 0, and num_engines x data_parallel_size x tensor_parallel_size devices for "
        "rollout, divided over the machines",
        {
            MODE: "separate_async",
            BOUND: 0,
            f"{ROLLOUT}.n_gpus_per_node": lambda of: math.ceil(
                of("generator.num_engines", 1)
                * of("generator.data_parallel_size", 1)
                * of(f"{ROLLOUT}.tensor_model_parallel_size")
                / of("trainer.nnodes")
            ),
        },
        silent=[True],
    ),
    combined(
        f"trainer.fully_async.enabled {STALENESS}",
        "separate_async, max_off_policy_threshold = max_staleness_steps",
        {MODE: "separate_async", BOUND: lambda of: of(STALENESS, 4)},
        silent=[False],
    ),
    # A token's loss is weighted by its ratio to the engine's probability, and 0 outside the clip range.
    combined(
        "trainer.algorithm.policy_loss_type",
        f"{CORRECTION}: bypass_mode, loss_type=reinforce, rollout_is=token, a threshold of the clip range around 1",
        {
            BYPASS: True,
            f"{CORRECTION}.loss_type": "reinforce",
            f"{CORRECTION}.rollout_is": "token",
            f"{CORRECTION}.rollout_is_threshold": lambda of: f"{1 - of(LOW, 0.2):g}_{1 + of(HIGH, 0.2):g}",
        },
        when="^rollout_is$",
    ),
    _mask("geometric", "seq_mean_k1", "geo", 0.99, 1.01),
    _mask("product", "seq_sum_k1", "product", 0.5, 2),
]
