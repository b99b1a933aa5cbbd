"""Keys of AReaL that are computed from several, next to the table keys.yaml."""

import math

from hybridrl.compat.entries import combined
from hybridrl.compat.verl.keys import BOUND, MODE

STALENESS, PER_NODE = "rollout.max_head_offpolicyness", "trainer.n_gpus_per_node"
# An engine's or trainer's devices, such as sglang:d4t2: data, tensor, pipeline and context parallel.
ENGINES = r"(?:\w+(?:\[\w+\])?[:.])?(?:d(?P<d>\d+)|t(?P<t>\d+)|p(?P<p>\d+)|[ce]\d+)+"
TRAINER = r"(?:\w+(?:\[\w+\])?[:.])?(?:d(?P<D>\d+)|t(?P<T>\d+)|p(?P<P>\d+)|c(?P<C>\d+)|e\d+)+"
SEPARATE = {MODE: "separate_async", BOUND: lambda of: of(STALENESS, 0)}
TRAINING = {
    "trainer.nnodes": lambda of: math.ceil(of.size("DTPC") / of(PER_NODE, 8)),
    "trainer.n_gpus_per_node": lambda of: min(of.size("DTPC"), of(PER_NODE, 8)),
}
ROLLOUT = {
    "actor_rollout_ref.rollout.nnodes": lambda of: math.ceil(of.size("dtp") / of(PER_NODE, 8)),
    "actor_rollout_ref.rollout.n_gpus_per_node": lambda of: min(of.size("dtp"), of(PER_NODE, 8)),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": lambda of: of.size("t"),
}

COMPUTED = [
    combined(
        STALENESS,
        "colocate_async, with max_off_policy_threshold at its value",
        {MODE: "colocate_async", BOUND: lambda of: of(STALENESS)},
        silent=[0],
    ),
    combined(
        "allocation_mode",
        f"separate_async, with the devices of both parts and max_off_policy_threshold={STALENESS}",
        SEPARATE | TRAINING | ROLLOUT,
        when=rf"^{ENGINES}\+{TRAINER}$",
    ),
    combined(
        "rollout.backend",
        f"separate_async, with these devices for rollout and max_off_policy_threshold={STALENESS}",
        SEPARATE | ROLLOUT,
        when=rf"^{ENGINES}$",
    ),
    combined("actor.backend", "the devices for training", TRAINING, when=rf"^{TRAINER}$"),
    combined(
        "rollout.scheduling_strategy.type actor.scheduling_strategy.type",
        "",
        {MODE: "colocate_async"},
        when="^colocation$",
    ),
]
