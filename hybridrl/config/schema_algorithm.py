"""The typed configuration of the algorithm; see schema.py."""

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridrl.config.values import ESTIMATORS, AboveZero, KLForm, NameOrFunction, NonNegative, Positive, Share


@dataclass
class KLControlConfig:
    type: Literal["fixed", "adaptive"]
    kl_coef: NonNegative
    horizon: Positive
    target_kl: AboveZero


@dataclass
class FilterGroupsConfig:
    enable: bool
    metric: str | None
    max_num_gen_batches: int


@dataclass
class RolloutCorrectionConfig:
    rollout_is: Literal["token", "sequence", "geometric"] | None
    rollout_is_threshold: str | None
    rollout_is_batch_normalize: bool
    rollout_rs: list[str]
    rollout_rs_threshold: list[str]
    bypass_mode: bool
    loss_type: Literal["ppo_clip", "reinforce"]


@dataclass
class AlgorithmConfig:
    adv_estimator: Annotated[str, NameOrFunction(ESTIMATORS)]
    gamma: Share
    lam: Share
    norm_adv_by_std_in_grpo: bool
    gdpo_reward_keys: list[str]
    gdpo_reward_weights: list[float]
    filter_groups: FilterGroupsConfig
    mask_truncated: bool
    rollout_correction: RolloutCorrectionConfig
    use_kl_in_reward: bool
    kl_penalty: KLForm
    kl_ctrl: KLControlConfig
