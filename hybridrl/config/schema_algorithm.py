"""The typed configuration of the algorithm, its policy loss and the rewards; see schema.py."""

from dataclasses import make_dataclass
from typing import Annotated, Any, Literal

from hybridrl.config.catalog import BYPASS_LOSSES, ESTIMATOR_NAMES, POLICY_LOSS_NAMES, parameter_types
from hybridrl.config.files import Script
from hybridrl.config.values import (
    AboveZero,
    Infinite,
    KLForm,
    Natural,
    NonNegative,
    Positive,
    Seconds,
    Section,
    Share,
    name_or_function,
)

PolicyLossConfig = make_dataclass(
    "PolicyLossConfig",
    [("loss_mode", Annotated[str, name_or_function(POLICY_LOSS_NAMES)]), *parameter_types()],
    namespace={"__module__": __name__},
)


class KLControlConfig(Section):
    type: Literal["fixed", "adaptive"]
    kl_coef: NonNegative
    horizon: Positive
    target_kl: AboveZero


class FilterGroupsConfig(Section):
    enable: bool
    metric: str | None
    max_num_gen_batches: int


class RolloutCorrectionConfig(Section):
    rollout_is: Literal["auto", "token", "sequence", "geometric"] | None
    rollout_is_threshold: str | None
    rollout_is_batch_normalize: bool
    rollout_rs: list[str]
    rollout_rs_threshold: list[str]
    bypass_mode: bool
    loss_type: Literal[tuple(BYPASS_LOSSES)]  # pyrefly: ignore[invalid-literal]  # known in one place


class AlgorithmConfig(Section):
    adv_estimator: Annotated[str, name_or_function(ESTIMATOR_NAMES)]
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


class CustomRewardConfig(Section):
    path: Script | None
    name: str | None
    reward_kwargs: dict[str, Any]


class RewardManagerModuleConfig(Section):
    path: Script | None
    name: str


class RewardManagerConfig(Section):
    source: Literal["register", "importlib"]
    name: str
    module: RewardManagerModuleConfig


class SandboxConfig(Section):
    url: str | None
    memory_limit_mb: Positive


class OverlongBufferConfig(Section):
    enable: bool
    len: Natural
    penalty_factor: NonNegative
    log: bool


class RewardKwargsConfig(Section):
    max_resp_len: Positive
    overlong_buffer_cfg: OverlongBufferConfig


class RewardConfig(Section):
    num_workers: Natural
    timeout: Seconds
    memory_mb: Positive | None
    retries: Natural
    on_error: Literal["exclude", "zero", "stop"]
    max_fault_rate: Share
    max_fault_steps: Positive
    functions: dict[str, Any]
    weights: dict[str, Any]
    add_environment_reward: bool
    scale: float
    clip_range: list[Annotated[float, Infinite()]]
    max_concurrent: Positive
    max_rpm: AboveZero | None
    max_tpm: AboveZero | None
    estimated_tokens_per_request: Positive
    custom_reward_function: CustomRewardConfig
    reward_manager: RewardManagerConfig
    sandbox_fusion: SandboxConfig
    reward_kwargs: RewardKwargsConfig
