"""The typed configuration of supervised fine-tuning; see schema.py."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from hybridrl.config.row_files import RowFiles
from hybridrl.config.schema import CheckpointConfig, FSDPConfig, ModelConfig, OptimizerConfig, RayConfig
from hybridrl.config.values import AboveZero, Frequency, Natural, PathOrHub, Positive, ResumeMode, Seconds


@dataclass
class SFTDataConfig:
    tokenizer: Annotated[str, PathOrHub()] | None
    train_files: Annotated[list[str], RowFiles(least=1)]
    val_files: Annotated[list[str], RowFiles()]
    train_max_samples: int
    val_max_samples: int
    messages_key: str
    prompt_key: str
    response_key: str
    max_length: Positive
    train_batch_size: Positive
    max_token_len_per_gpu: Positive
    shuffle: bool
    seed: Natural
    truncation: Literal["error", "left", "right"]
    trust_remote_code: bool
    apply_chat_template_kwargs: dict[str, Any]


@dataclass
class SFTTrainerConfig:
    device: Literal["auto", "cuda", "cpu"]
    nnodes: Positive
    n_gpus_per_node: Positive | None
    seed: Natural
    deterministic: bool
    total_epochs: Positive
    total_training_steps: Positive | None
    project_name: str
    experiment_name: str
    default_local_dir: str
    logger: list[str]
    test_freq: Frequency
    save_freq: Frequency
    save_freq_epochs: AboveZero | None
    save_freq_secs: AboveZero | None
    max_actor_ckpt_to_keep: Positive | None
    keep_best_ckpt: str | None
    ckpt_freq_secs: float
    resume_mode: ResumeMode
    resume_from_path: str | None
    resume_allow: list[str]
    reset_optimizer: bool
    max_restarts: Natural
    max_skipped_updates: Positive
    startup_timeout: Seconds
    step_timeout: Seconds


@dataclass
class SFTEngineConfig:
    grad_clip: AboveZero
    nccl_timeout: Positive
    ulysses_sequence_parallel_size: Positive
    fsdp_config: FSDPConfig


@dataclass
class SFTConfig:
    """The whole of `conf/sft_trainer.yaml`."""

    data: SFTDataConfig
    model: ModelConfig
    optim: OptimizerConfig
    engine: SFTEngineConfig
    checkpoint: CheckpointConfig
    trainer: SFTTrainerConfig
    ray_kwargs: RayConfig
