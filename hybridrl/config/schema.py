"""The typed configuration: names and types only.

The values, and what each key means, stand in `conf/*.yaml`, once. Past the front door nothing else is read:
a constructor takes one of these sections or plain values.
"""

from dataclasses import dataclass
from typing import Any


@dataclass
class DataConfig:
    tokenizer: str | None
    train_files: Any  # one path or a list; always list[str] once loaded
    val_files: Any
    train_max_samples: int
    val_max_samples: int
    prompt_key: str
    reward_fn_key: str
    max_prompt_length: int
    max_response_length: int
    train_batch_size: int
    shuffle: bool
    validation_shuffle: bool
    seed: int
    filter_overlong_prompts: bool
    truncation: str
    trust_remote_code: bool
    apply_chat_template_kwargs: dict[str, Any]


@dataclass
class ModelConfig:
    path: str
    tokenizer_path: str | None
    trust_remote_code: bool
    custom_chat_template: str | None
    override_config: dict[str, Any]
    enable_gradient_checkpointing: bool
    use_remove_padding: bool


@dataclass
class OptimizerConfig:
    optimizer: str
    lr: float
    betas: list[float]
    weight_decay: float
    lr_scheduler_type: str
    lr_warmup_steps: int
    lr_warmup_steps_ratio: float
    min_lr_ratio: float
    num_cycles: float
    total_training_steps: int
    muon_lr: float
    muon_momentum: float


@dataclass
class WrapPolicyConfig:
    transformer_layer_cls_to_wrap: Any


@dataclass
class FSDPConfig:
    fsdp_size: int
    param_offload: bool
    optimizer_offload: bool
    reshard_after_forward: bool
    forward_prefetch: bool
    model_dtype: str
    dtype: str | None
    wrap_policy: WrapPolicyConfig


@dataclass
class PolicyLossConfig:
    loss_mode: str


@dataclass
class ActorConfig:
    strategy: str
    ppo_mini_batch_size: int
    ppo_micro_batch_size_per_gpu: int | None
    use_dynamic_bsz: bool
    ppo_max_token_len_per_gpu: int
    ppo_epochs: int
    shuffle: bool
    data_loader_seed: int
    policy_loss: PolicyLossConfig
    clip_ratio: float
    clip_ratio_low: float | None
    clip_ratio_high: float | None
    clip_ratio_c: float
    loss_agg_mode: str
    loss_scale_factor: float | None
    entropy_coeff: float
    use_kl_loss: bool
    kl_loss_coef: float
    kl_loss_type: str
    grad_clip: float
    optim: OptimizerConfig
    fsdp_config: FSDPConfig


@dataclass
class ReferenceFSDPConfig:
    param_offload: bool


@dataclass
class ReferenceConfig:
    log_prob_micro_batch_size_per_gpu: int | None
    log_prob_use_dynamic_bsz: bool
    log_prob_max_token_len_per_gpu: int
    fsdp_config: ReferenceFSDPConfig


@dataclass
class ValidationSamplingConfig:
    n: int
    do_sample: bool
    temperature: float
    top_p: float
    top_k: int


@dataclass
class EngineKwargsConfig:
    vllm: dict[str, Any]


@dataclass
class WeightTransferConfig:
    update_weights_bucket_megabytes: int


@dataclass
class RolloutConfig:
    name: str
    mode: str
    n: int
    do_sample: bool
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    min_tokens: int
    ignore_eos: bool
    seed: int
    prompt_length: int
    response_length: int
    dtype: str | None
    tensor_model_parallel_size: int
    gpu_memory_utilization: float
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    enforce_eager: bool
    free_cache_engine: bool
    calculate_log_probs: bool
    log_prob_micro_batch_size_per_gpu: int | None
    log_prob_use_dynamic_bsz: bool
    log_prob_max_token_len_per_gpu: int
    request_timeout: float
    request_retries: int
    checkpoint_engine: WeightTransferConfig
    engine_kwargs: EngineKwargsConfig
    val_kwargs: ValidationSamplingConfig


@dataclass
class ActorRolloutRefConfig:
    hybrid_engine: bool
    nccl_timeout: int
    model: ModelConfig
    actor: ActorConfig
    ref: ReferenceConfig
    rollout: RolloutConfig


@dataclass
class CustomRewardConfig:
    path: str | None
    name: str
    reward_kwargs: dict[str, Any]


@dataclass
class RewardManagerConfig:
    name: str


@dataclass
class RewardConfig:
    num_workers: int
    timeout: float
    on_error: str
    max_fault_rate: float
    max_fault_steps: int
    custom_reward_function: CustomRewardConfig
    reward_manager: RewardManagerConfig


@dataclass
class KLControlConfig:
    type: str
    kl_coef: float
    horizon: int
    target_kl: float


@dataclass
class AlgorithmConfig:
    adv_estimator: str
    norm_adv_by_std_in_grpo: bool
    use_kl_in_reward: bool
    kl_penalty: str
    kl_ctrl: KLControlConfig


@dataclass
class TrainerConfig:
    device: str
    nnodes: int
    n_gpus_per_node: int | None
    seed: int
    total_epochs: int
    total_training_steps: int | None
    project_name: str
    experiment_name: str
    default_local_dir: str
    logger: list[str]
    log_val_generations: int
    rollout_data_dir: str | None
    validation_data_dir: str | None
    val_before_train: bool
    val_only: bool
    test_freq: int
    save_freq: int
    startup_timeout: float
    step_timeout: float


@dataclass
class RayConfig:
    ray_init: dict[str, Any]


@dataclass
class PPOConfig:
    """The whole of `conf/ppo_trainer.yaml`."""

    data: DataConfig
    actor_rollout_ref: ActorRolloutRefConfig
    reward: RewardConfig
    algorithm: AlgorithmConfig
    trainer: TrainerConfig
    ray_kwargs: RayConfig


@dataclass
class SFTDataConfig:
    tokenizer: str | None
    train_files: Any
    val_files: Any
    train_max_samples: int
    val_max_samples: int
    messages_key: str
    prompt_key: str
    response_key: str
    max_length: int
    train_batch_size: int
    max_token_len_per_gpu: int
    shuffle: bool
    seed: int
    truncation: str
    trust_remote_code: bool
    apply_chat_template_kwargs: dict[str, Any]


@dataclass
class SFTTrainerConfig:
    device: str
    nnodes: int
    n_gpus_per_node: int | None
    seed: int
    total_epochs: int
    total_training_steps: int | None
    project_name: str
    experiment_name: str
    default_local_dir: str
    logger: list[str]
    test_freq: int
    save_freq: int
    startup_timeout: float
    step_timeout: float


@dataclass
class SFTEngineConfig:
    grad_clip: float
    nccl_timeout: int
    fsdp_config: FSDPConfig


@dataclass
class SFTConfig:
    """The whole of `conf/sft_trainer.yaml`."""

    data: SFTDataConfig
    model: ModelConfig
    optim: OptimizerConfig
    engine: SFTEngineConfig
    trainer: SFTTrainerConfig
    ray_kwargs: RayConfig
