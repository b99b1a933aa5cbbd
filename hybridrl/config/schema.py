"""The typed configuration: the sections, their keys, and what each key may hold.

The values of the keys and their meanings are in `conf/*.yaml`. Past the entry points nothing else is read: a
constructor takes one of these sections or plain values.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from hybridrl.config.files import Adapter, Model, ModelOrTokenizer, RowNames, Script, TrainFiles
from hybridrl.config.schema_algorithm import AlgorithmConfig, PolicyLossConfig, RewardConfig
from hybridrl.config.values import (
    AboveZero,
    Aggregation,
    CheckpointPart,
    Decay,
    DType,
    Frequency,
    KLForm,
    Natural,
    NonNegative,
    Positive,
    Range,
    ResumeMode,
    Seconds,
    Share,
    ShareAboveZero,
    TopK,
    pair,
)


@dataclass
class FurtherLoRAConfig:
    merge: bool
    dropout: Decay


@dataclass
class LoRAConfig:
    """Once resolved, `lora_rank` is above 0 exactly if the model is trained with LoRA."""

    lora_rank: Natural
    lora_alpha: Natural
    target_modules: list[str]
    exclude_modules: list[str]
    lora_adapter_path: Adapter | None
    lora: FurtherLoRAConfig


@dataclass
class CustomDatasetConfig:
    path: Script | None
    name: str | None


@dataclass
class SamplerConfig:
    class_path: Script | None
    class_name: str | None


@dataclass
class RowsConfig:
    """What training and supervised fine-tuning share of the section `data`."""

    tokenizer: ModelOrTokenizer | None
    train_files: TrainFiles
    val_files: RowNames
    train_max_samples: int
    val_max_samples: int
    prompt_key: str
    train_batch_size: Positive
    shuffle: bool
    trust_remote_code: bool
    apply_chat_template_kwargs: dict[str, Any]


@dataclass
class DataConfig(RowsConfig):
    train_weights: list[AboveZero]
    reward_fn_key: str
    max_prompt_length: Positive
    max_response_length: Positive
    gen_batch_size: Positive | None
    validation_shuffle: bool
    seed: Natural | None
    filter_overlong_prompts: bool
    truncation: Literal["error", "left", "right", "middle"]
    custom_cls: CustomDatasetConfig
    sampler: SamplerConfig


@dataclass
class ModelConfig(LoRAConfig):
    path: Model
    tokenizer_path: ModelOrTokenizer | None
    trust_remote_code: bool
    external_lib: list[str]
    custom_chat_template: str | None
    override_config: dict[str, Any]
    enable_gradient_checkpointing: bool
    selective_checkpointing: bool
    use_remove_padding: bool


@dataclass
class OptimizerConfig:
    optimizer: Literal["AdamW", "Muon"]
    lr: NonNegative
    betas: Annotated[list[Decay], pair]
    weight_decay: NonNegative
    lr_scheduler_type: Literal["constant", "linear", "cosine"]
    lr_warmup_steps: float | None
    lr_warmup_steps_ratio: Share
    min_lr_ratio: Share | None
    num_cycles: AboveZero
    muon_lr: NonNegative
    muon_momentum: Decay
    override_optimizer_config: dict[str, Any]


@dataclass
class WrapPolicyConfig:
    transformer_layer_cls_to_wrap: list[str]


@dataclass
class FSDPConfig:
    fsdp_size: Annotated[int, Range(least=-1)]
    ulysses_sequence_parallel_size: Positive
    param_offload: bool
    optimizer_offload: bool
    offload_policy: bool
    reshard_after_forward: bool
    forward_prefetch: bool
    compile_layers: bool
    model_dtype: DType
    dtype: DType | None
    full_determinism: bool
    wrap_policy: WrapPolicyConfig


@dataclass
class CheckpointConfig:
    save_contents: list[CheckpointPart]
    load_contents: list[CheckpointPart]
    async_save: bool


@dataclass
class ActorConfig:
    strategy: Literal["fsdp", "fsdp2"]
    ppo_mini_batch_size: Positive
    ppo_micro_batch_size: Positive | None
    ppo_micro_batch_size_per_gpu: Positive | None
    use_dynamic_bsz: bool
    ppo_max_token_len_per_gpu: Positive
    ulysses_sequence_parallel_size: Positive
    ppo_epochs: Positive
    shuffle: bool
    data_loader_seed: int
    policy_loss: PolicyLossConfig
    clip_ratio: NonNegative
    clip_ratio_low: NonNegative | None
    clip_ratio_high: NonNegative | None
    clip_ratio_c: Annotated[float, Range(above=1)]
    tau_pos: AboveZero
    tau_neg: AboveZero
    loss_agg_mode: Aggregation
    loss_scale_factor: AboveZero | None
    entropy_coeff: float
    use_kl_loss: bool
    kl_loss_coef: NonNegative
    kl_loss_type: KLForm
    grad_clip: AboveZero
    optim: OptimizerConfig
    fsdp_config: FSDPConfig
    checkpoint: CheckpointConfig


@dataclass
class ReferenceFSDPConfig:
    param_offload: bool
    wrap_policy: WrapPolicyConfig


@dataclass
class ReferenceModelConfig:
    path: Model


@dataclass
class ReferenceConfig:
    model: ReferenceModelConfig
    refresh_freq: int
    log_prob_micro_batch_size: Positive | None
    log_prob_micro_batch_size_per_gpu: Positive | None
    log_prob_use_dynamic_bsz: bool
    log_prob_max_token_len_per_gpu: Positive
    fsdp_config: ReferenceFSDPConfig


@dataclass
class CriticConfig:
    enable: bool | None
    strategy: Literal["fsdp", "fsdp2"]
    model: ModelConfig
    optim: OptimizerConfig
    fsdp: FSDPConfig
    ppo_mini_batch_size: Positive
    ppo_micro_batch_size: Positive | None
    ppo_micro_batch_size_per_gpu: Positive | None
    use_dynamic_bsz: bool
    ppo_max_token_len_per_gpu: Positive
    forward_micro_batch_size: Positive | None
    forward_micro_batch_size_per_gpu: Positive | None
    forward_max_token_len_per_gpu: Positive
    ulysses_sequence_parallel_size: Positive
    ppo_epochs: Positive
    shuffle: bool
    data_loader_seed: int
    cliprange_value: AboveZero
    loss_agg_mode: Aggregation
    loss_scale_factor: AboveZero | None
    grad_clip: AboveZero
    checkpoint: CheckpointConfig


@dataclass
class ValidationSamplingConfig:
    n: Positive
    do_sample: bool
    temperature: NonNegative
    top_p: ShareAboveZero
    top_k: TopK


@dataclass
class EngineKwargsConfig:
    vllm: dict[str, Any]


@dataclass
class WeightTransferConfig:
    update_weights_bucket_megabytes: Positive


@dataclass
class RolloutConfig:
    name: Literal["vllm"]
    mode: Literal["async", "sync"]
    n: Positive
    do_sample: bool
    temperature: NonNegative
    top_p: ShareAboveZero
    top_k: TopK
    repetition_penalty: AboveZero
    min_tokens: Natural
    ignore_eos: bool
    seed: Natural
    full_determinism: bool
    prompt_length: Positive
    response_length: Positive
    dtype: DType | None
    tensor_model_parallel_size: Positive
    gpu_memory_utilization: ShareAboveZero
    max_model_len: Positive | None
    max_num_seqs: Positive
    max_num_batched_tokens: Positive
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    enforce_eager: bool
    cudagraph_capture_sizes: list[Positive]
    free_cache_engine: bool
    calculate_log_probs: bool
    log_prob_micro_batch_size: Positive | None
    log_prob_micro_batch_size_per_gpu: Positive | None
    log_prob_use_dynamic_bsz: bool
    log_prob_max_token_len_per_gpu: Positive
    max_log_prob_gap: AboveZero | None
    request_timeout: Seconds
    request_retries: Natural
    checkpoint_engine: WeightTransferConfig
    engine_kwargs: EngineKwargsConfig
    val_kwargs: ValidationSamplingConfig


@dataclass
class ActorRolloutRefConfig:
    hybrid_engine: Literal[True]
    nccl_timeout: Positive
    model: ModelConfig
    actor: ActorConfig
    ref: ReferenceConfig
    rollout: RolloutConfig


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

    @property
    def devices(self) -> int:
        """The number of devices over all nodes."""
        return (self.n_gpus_per_node or 1) * self.nnodes


@dataclass
class TrainerConfig(SFTTrainerConfig):
    log_val_generations: Natural
    rollout_data_dir: str | None
    validation_data_dir: str | None
    val_before_train: bool
    val_only: bool
    max_critic_ckpt_to_keep: Positive | None
    critic_warmup: Natural


@dataclass
class RayConfig:
    ray_init: dict[str, Any]


@dataclass
class PPOConfig:
    """The configuration of `main_ppo`: conf/ppo_trainer.yaml."""

    data: DataConfig
    actor_rollout_ref: ActorRolloutRefConfig
    critic: CriticConfig
    reward: RewardConfig
    algorithm: AlgorithmConfig
    trainer: TrainerConfig
    ray_kwargs: RayConfig
    own: dict[str, Any]


@dataclass
class SFTDataConfig(RowsConfig):
    messages_key: str
    response_key: str
    max_length: Positive
    max_token_len_per_gpu: Positive
    seed: Natural
    truncation: Literal["error", "left", "right"]


@dataclass
class SFTEngineConfig:
    grad_clip: AboveZero
    nccl_timeout: Positive
    ulysses_sequence_parallel_size: Positive
    fsdp_config: FSDPConfig


@dataclass
class SFTConfig:
    """The configuration of `main_sft`: conf/sft_trainer.yaml."""

    data: SFTDataConfig
    model: ModelConfig
    optim: OptimizerConfig
    engine: SFTEngineConfig
    checkpoint: CheckpointConfig
    trainer: SFTTrainerConfig
    ray_kwargs: RayConfig
