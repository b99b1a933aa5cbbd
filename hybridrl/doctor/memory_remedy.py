"""Which overrides mend a lack of memory: each is tried on the plan, and the one with the largest effect comes first.

None of them changes what is learnt.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from hybridrl.config import PPOConfig
from hybridrl.doctor.memory_setup import Setup, setup

ACTOR, ROLLOUT, REF, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref", "critic"
SWITCHED_ON = (
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    f"{CRITIC}.model.enable_gradient_checkpointing",
    f"{REF}.fsdp_config.param_offload",
    f"{ACTOR}.fsdp_config.param_offload",
    f"{ACTOR}.fsdp_config.optimizer_offload",
    f"{CRITIC}.fsdp.param_offload",
    f"{CRITIC}.fsdp.optimizer_offload",
)
# Only where all else is not enough: the optimizer then steps on the CPU.
SLOW = (f"{ACTOR}.fsdp_config.offload_policy", f"{CRITIC}.fsdp.offload_policy")
TOKENS = (
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{REF}.log_prob_max_token_len_per_gpu",
    f"{CRITIC}.ppo_max_token_len_per_gpu",
    f"{CRITIC}.forward_max_token_len_per_gpu",
)
ROWS = (f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{CRITIC}.ppo_micro_batch_size_per_gpu", f"{ROLLOUT}.max_num_seqs")
SHARE = f"{ROLLOUT}.gpu_memory_utilization"


def remedy(run: Setup, peak: Callable[[Setup], float], limit: float) -> str:
    """Overrides under which the peak stays within the limit, in words."""
    chosen: dict[str, Any] = {}
    while (present := peak(run)) > limit:
        for offered in (options(run), _switches(run, SLOW)):
            effects = {key: peak(_with(run, key, values[-1])) for key, values in offered.items()}
            key = min(effects, key=lambda key: effects[key], default=None)
            if key is not None and effects[key] < present:
                break
        else:
            break
        tried = [(value, _with(run, key, value)) for value in offered[key]]
        chosen[key], run = next(((value, other) for value, other in tried if peak(other) <= limit), tried[-1])
    words = " ".join(f"{key}={str(value).lower()}" for key, value in chosen.items())
    if present <= limit:
        return f"set {words}"
    last = "take a smaller model, more devices, or an adapter (actor_rollout_ref.model.lora_rank=32)"
    return f"set {words}, which is not enough: {last}" if chosen else last


def options(run: Setup) -> dict[str, list[Any]]:
    """Values of keys that may take less, from the mildest to the strongest."""
    found = _switches(run, SWITCHED_ON)
    found |= {key: _halves(_value(run.config, key), run.longest) for key in TOKENS}
    found |= {key: _halves(_value(run.config, key) or 1, 1) for key in ROWS}
    if not run.on_cpu:
        shares = range(round(100 * _value(run.config, SHARE)) - 5, 9, -5)
        found[SHARE] = [percent / 100 for percent in shares]
    return {key: values for key, values in found.items() if values}


def _switches(run: Setup, keys: Sequence[str]) -> dict[str, list[Any]]:
    return {key: [True] for key in keys if _value(run.config, key) is False}


def _halves(value: int, least: int) -> list[int]:
    found = []
    while value // 2 >= least:
        found.append(value := value // 2)
    return found


def _with(run: Setup, key: str, value: Any) -> Setup:
    config = copy.deepcopy(run.config)
    *sections, last = key.split(".")
    vars(_section(config, sections))[last] = value
    return setup(config, run.models, run.gpu)


def _value(config: PPOConfig, key: str) -> Any:
    *sections, last = key.split(".")
    return vars(_section(config, sections))[last]


def _section(config: PPOConfig, names: list[str]) -> Any:
    section: Any = config
    for name in names:
        section = vars(section)[name]
    return section
