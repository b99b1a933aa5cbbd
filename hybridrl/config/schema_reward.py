"""The typed configuration of rewards: the section `reward`."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from hybridrl.config.values import AboveZero, Natural, NonNegative, Positive, ScriptFile, Seconds, Share


@dataclass
class CustomRewardConfig:
    path: Annotated[str, ScriptFile()] | None
    name: str | None
    reward_kwargs: dict[str, Any]


@dataclass
class RewardManagerModuleConfig:
    path: Annotated[str, ScriptFile()] | None
    name: str


@dataclass
class RewardManagerConfig:
    source: Literal["register", "importlib"]
    name: str
    module: RewardManagerModuleConfig


@dataclass
class SandboxConfig:
    url: str | None
    memory_limit_mb: Positive


@dataclass
class OverlongBufferConfig:
    enable: bool
    len: Positive
    penalty_factor: NonNegative
    log: bool


@dataclass
class RewardKwargsConfig:
    max_resp_len: Positive
    overlong_buffer_cfg: OverlongBufferConfig


@dataclass
class RewardConfig:
    num_workers: Natural
    timeout: Seconds
    memory_mb: Positive | None
    retries: Natural
    on_error: Literal["exclude", "zero", "stop"]
    max_fault_rate: Share
    max_fault_steps: Positive
    functions: dict[str, Any]
    weights: dict[str, Any]
    scale: float
    clip_range: list[float]
    max_concurrent: Positive
    max_rpm: AboveZero | None
    max_tpm: AboveZero | None
    estimated_tokens_per_request: Positive
    custom_reward_function: CustomRewardConfig
    reward_manager: RewardManagerConfig
    sandbox_fusion: SandboxConfig
    reward_kwargs: RewardKwargsConfig
