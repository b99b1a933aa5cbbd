"""The typed configuration: the sections, their keys, and the types of the keys.

The values of the keys and their meanings are in `conf/*.yaml`. After the entry points nothing else is read: a
constructor takes one of these sections or plain values.
"""

from typing import Annotated, Any, Literal

from hybridrl.config import values
from hybridrl.config.files import AdapterPath, ModelOrTokenizer, ModelPath, RowNames, Script, TrainFiles
from hybridrl.config.schema_parts import (
    AlgorithmConfig,
    Curriculum,
    EvalConfig,
    PairsConfig,
    PolicyLossConfig,
    RayOptions,
    RewardConfig,
    RolloutConfig,
    SamplerConfig,
    V1Config,
)
from hybridrl.config.teachers import DistillationConfig
from hybridrl.config.values import Section


class FurtherLoRAConfig(Section):
    merge: bool
    dropout: values.Decay


class LoRAConfig(Section):
    """Once resolved, `lora_rank` is above 0 exactly if the model is trained with LoRA."""

    lora_rank: values.Natural
    lora_alpha: values.Natural
    target_modules: list[str]
    exclude_modules: list[str]
    lora_adapter_path: AdapterPath | None
    lora: FurtherLoRAConfig


class CustomDatasetConfig(Section):
    path: Script | None
    name: str | None


class RowsConfig(Section):
    """The keys of the section `data` for both training and supervised fine-tuning."""

    tokenizer: ModelOrTokenizer | None
    train_files: TrainFiles
    val_files: RowNames
    train_max_samples: int
    val_max_samples: int
    prompt_key: str
    tools_key: str
    train_batch_size: values.Positive
    shuffle: bool
    trust_remote_code: bool
    apply_chat_template_kwargs: dict[str, Any]


class DataConfig(RowsConfig):
    train_weights: list[values.AboveZero]
    curriculum: Curriculum
    reward_fn_key: str
    ground_truth_key: str | None
    image_key: str
    mm_processor_kwargs: dict[str, Any]
    max_prompt_length: values.Positive
    max_response_length: values.Positive
    gen_batch_size: values.Positive | None
    drop_last: bool
    validation_shuffle: bool
    seed: values.Natural | None
    filter_overlong_prompts: bool
    truncation: Literal["error", "left", "right", "middle"]
    custom_cls: CustomDatasetConfig
    sampler: SamplerConfig


class ModelConfig(LoRAConfig):
    path: ModelPath
    tokenizer_path: ModelOrTokenizer | None
    trust_remote_code: bool
    external_lib: list[str]
    custom_chat_template: str | None
    override_config: dict[str, Any]
    enable_gradient_checkpointing: values.Recomputation | None
    selective_checkpointing: bool
    use_remove_padding: bool

    @property
    def recomputes_every(self) -> int:
        """N for every N-th layer, 0 for no layer; all layers if it is undecided."""
        return 1 if self.enable_gradient_checkpointing is None else int(self.enable_gradient_checkpointing)


class OptimizerConfig(Section):
    optimizer: Annotated[Literal["AdamW", "Muon"], values.Means({"adam": "AdamW", "adamw": "AdamW", "muon": "Muon"})]
    lr: values.NonNegative
    betas: Annotated[list[values.Decay], values.pair]
    weight_decay: values.NonNegative
    skip_zero_gradient: bool
    lr_scheduler_type: values.ScheduleName
    lr_warmup_steps: float | None
    lr_warmup_steps_ratio: values.Share
    min_lr_ratio: values.Share | None
    num_cycles: values.AboveZero
    stable_ratio: values.Share
    muon_lr: values.NonNegative
    muon_momentum: values.Decay
    override_optimizer_config: dict[str, Any]


class WrapPolicyConfig(Section):
    transformer_layer_cls_to_wrap: list[str]


class FSDPConfig(Section):
    fsdp_size: Annotated[int, values.Range(least=-1)]
    tensor_parallel_size: values.Positive
    expert_parallel_size: values.Positive
    ulysses_sequence_parallel_size: values.Positive
    param_offload: bool
    optimizer_offload: bool
    offload_policy: bool
    reshard_after_forward: bool
    forward_prefetch: bool
    compile_layers: bool | None
    model_dtype: values.DType
    dtype: values.DType | None
    full_determinism: bool
    wrap_policy: WrapPolicyConfig


class CheckpointConfig(Section):
    save_contents: list[values.CheckpointPart]
    load_contents: list[values.CheckpointPart]
    async_save: bool


def replay_mode(value: str) -> values.ValueFault | None:
    """A rule: the experts that an update uses."""
    if value == "R2":  # verl's
        cause = "the experts of the old policy's own forward pass, which may differ from the engine's, are not replayed"
        return values.ValueFault(cause, "set R3, which replays the engine's")
    return None if value in REPLAYS else values.choices(value, REPLAYS, REPLAYS)


REPLAYS = ["disabled", "auto", "R3"]


class RouterReplayConfig(Section):
    mode: Annotated[str, replay_mode]


class ActorConfig(Section):
    strategy: Literal["fsdp", "fsdp2"]
    ppo_mini_batch_size: values.Positive
    ppo_micro_batch_size: values.Positive | None
    ppo_micro_batch_size_per_gpu: values.Positive | None
    use_dynamic_bsz: bool
    ppo_max_token_len_per_gpu: values.Positive
    ulysses_sequence_parallel_size: values.Positive
    ppo_epochs: values.Positive
    shuffle: bool
    data_loader_seed: int
    policy_loss: PolicyLossConfig
    clip_ratio: values.NonNegative
    clip_ratio_low: values.NonNegative | None
    clip_ratio_high: Annotated[float, values.Range(least=0), values.Infinite()] | None
    clip_ratio_c: Annotated[float, values.Range(above=1), values.Infinite()]
    tau_pos: values.AboveZero
    tau_neg: values.AboveZero
    loss_agg_mode: values.Aggregation
    loss_scale_factor: values.AboveZero | None
    entropy_coeff: float
    use_kl_loss: bool
    kl_loss_coef: values.NonNegative
    kl_loss_type: values.KLForm
    grad_clip: values.Limit
    router_replay: RouterReplayConfig
    freeze_vision_tower: bool
    optim: OptimizerConfig
    fsdp_config: FSDPConfig
    checkpoint: CheckpointConfig


class ReferenceFSDPConfig(Section):
    param_offload: bool
    wrap_policy: WrapPolicyConfig


class ReferenceModelConfig(Section):
    path: ModelPath


class ReferenceConfig(Section):
    model: ReferenceModelConfig
    refresh_freq: int
    log_prob_micro_batch_size: values.Positive | None
    log_prob_micro_batch_size_per_gpu: values.Positive | None
    log_prob_use_dynamic_bsz: bool
    log_prob_max_token_len_per_gpu: values.Positive
    fsdp_config: ReferenceFSDPConfig


class CriticConfig(Section):
    enable: bool | None
    strategy: Literal["fsdp", "fsdp2"]
    model: ModelConfig
    optim: OptimizerConfig
    fsdp: FSDPConfig
    ppo_mini_batch_size: values.Positive
    ppo_micro_batch_size: values.Positive | None
    ppo_micro_batch_size_per_gpu: values.Positive | None
    use_dynamic_bsz: bool
    ppo_max_token_len_per_gpu: values.Positive
    forward_micro_batch_size: values.Positive | None
    forward_micro_batch_size_per_gpu: values.Positive | None
    forward_max_token_len_per_gpu: values.Positive
    ulysses_sequence_parallel_size: values.Positive
    ppo_epochs: values.Positive
    shuffle: bool
    data_loader_seed: int
    cliprange_value: values.Limit
    loss_agg_mode: values.Aggregation
    loss_scale_factor: values.AboveZero | None
    grad_clip: values.Limit
    checkpoint: CheckpointConfig


class ActorRolloutRefConfig(Section):
    nccl_timeout: values.Positive
    model: ModelConfig
    actor: ActorConfig
    ref: ReferenceConfig
    rollout: RolloutConfig


class SFTTrainerConfig(Section):
    device: Literal["auto", "cuda", "cpu"]
    nnodes: values.Positive
    n_gpus_per_node: values.Positive | None
    seed: values.Natural
    deterministic: bool
    total_epochs: values.Positive
    total_training_steps: values.Positive | None
    project_name: str
    experiment_name: str
    default_local_dir: str
    logger: Annotated[list[str], values.loggers]
    test_freq: values.Frequency
    save_freq: values.Frequency
    save_freq_epochs: values.AboveZero | None
    save_freq_secs: values.AboveZero | None
    max_actor_ckpt_to_keep: values.Positive | None
    keep_best_ckpt: Annotated[str, values.validation_metric] | None
    ckpt_freq_secs: float | None
    resume_mode: values.ResumeMode
    resume_from_path: str | None
    resume_allow: list[str]
    reset_optimizer: bool
    max_restarts: values.Natural
    max_skipped_updates: values.Positive
    on_diagnosis: Annotated[dict[str, Any], values.actions]
    health_rules: Annotated[list[str], values.functions]
    startup_timeout: values.Seconds
    step_timeout: values.Seconds

    @property
    def devices(self) -> int:
        """The number of devices over all nodes."""
        return (self.n_gpus_per_node or 1) * self.nnodes


class TrainerConfig(SFTTrainerConfig):
    log_val_generations: values.Natural
    rollout_data_dir: str | None
    rollout_tokens: values.Natural
    max_rollout_data_gb: values.AboveZero | None
    validation_data_dir: str | None
    spool_samples: bool
    val_before_train: bool
    val_only: bool
    max_critic_ckpt_to_keep: values.Positive | None
    critic_warmup: values.Natural
    v1: V1Config


class RayConfig(Section):
    ray_init: RayOptions


class PPOConfig(Section):
    """The configuration of `main_ppo`: conf/ppo_trainer.yaml."""

    data: DataConfig
    actor_rollout_ref: ActorRolloutRefConfig
    critic: CriticConfig
    reward: RewardConfig
    algorithm: AlgorithmConfig
    distillation: DistillationConfig
    trainer: TrainerConfig
    eval: EvalConfig
    ray_kwargs: RayConfig
    own: dict[str, Any]

    @property
    def separate(self) -> bool:
        """Whether rollout has its own devices."""
        return self.trainer.v1.trainer_mode == "separate_async"

    @property
    def rollout_pool(self) -> tuple[int, int]:
        """The number of machines of rollout, and its devices per machine."""
        pool = self.actor_rollout_ref.rollout if self.separate else self.trainer
        return pool.nnodes, pool.n_gpus_per_node or 1

    @property
    def devices_per_machine(self) -> int:
        """The largest number of devices that the run uses on a machine, if training and rollout share machines."""
        return (self.trainer.n_gpus_per_node or 1) + self.separate * self.rollout_pool[1]


class EvaluatedDataConfig(DataConfig):
    train_files: list[str] | None  # not read


class EvaluatedModelConfig(ModelConfig):
    path: str | None  # as it is named, such as RUN:best


class ServedConfig(Section):
    model: ModelConfig
    rollout: RolloutConfig


class EvaluatedConfig(ServedConfig):
    model: EvaluatedModelConfig


class EvaluationConfig(Section):
    """The configuration of `main_eval`: the part of conf/ppo_trainer.yaml that it reads."""

    data: EvaluatedDataConfig
    actor_rollout_ref: EvaluatedConfig
    reward: RewardConfig
    trainer: TrainerConfig
    eval: EvalConfig
    ray_kwargs: RayConfig
    own: dict[str, Any]
    separate = False  # all devices are for the engines
    rollout_pool, devices_per_machine = PPOConfig.rollout_pool, PPOConfig.devices_per_machine


class ServingConfig(Section):
    """The configuration of `serve`, and of an evaluation's model: the part of conf/ppo_trainer.yaml that they read."""

    actor_rollout_ref: ServedConfig


class SFTDataConfig(RowsConfig):
    messages_key: str
    response_key: str
    max_length: values.Positive
    max_token_len_per_gpu: values.Positive
    seed: values.Natural
    truncation: Literal["error", "left", "right"]


class SFTEngineConfig(Section):
    grad_clip: values.Limit
    nccl_timeout: values.Positive
    ulysses_sequence_parallel_size: values.Positive
    fsdp_config: FSDPConfig


class SFTConfig(Section):
    """The configuration of `main_sft` and `main_rm`: conf/sft_trainer.yaml."""

    data: SFTDataConfig
    pairs: PairsConfig
    model: ModelConfig
    optim: OptimizerConfig
    engine: SFTEngineConfig
    checkpoint: CheckpointConfig
    trainer: SFTTrainerConfig
    ray_kwargs: RayConfig

    @property
    def devices_per_machine(self) -> int:
        return self.trainer.n_gpus_per_node or 1


TrainingConfig = PPOConfig | SFTConfig
