"""The sections `rollout` and `eval` of the configuration, and what continues rollouts over steps; see schema.py."""

from typing import Annotated, Any, Literal

from hybridrl.config import values
from hybridrl.config.files import RowNames
from hybridrl.config.values import Section

SHIPPED_SHARE, WHOLE_SHARE = 0.5, 0.9  # of a GPU's memory for an engine: by default, and if no trainer needs the rest


class ValidationSamplingConfig(Section):
    n: values.Positive
    do_sample: bool
    temperature: values.NonNegative
    top_p: values.ShareAboveZero
    top_k: values.TopK


class EngineKwargsConfig(Section):
    vllm: dict[str, Any]


class WeightTransferConfig(Section):
    update_weights_bucket_megabytes: values.Positive


class MultiTurnConfig(Section):
    enable: bool
    environment: str | None
    environment_kwargs: dict[str, Any]
    tools: list[str]
    tool_config_path: str | None
    function_tool_path: str | None
    interaction_config_path: str | None
    format: str
    history_reasoning: Literal["keep", "strip"]
    tokenization_sanity_check_mode: Literal["strict", "ignore_strippable", "disable"]
    max_assistant_turns: values.Positive | None
    max_user_turns: values.Positive | None
    max_assistant_response_length: values.Positive | None
    max_parallel_calls: values.Positive
    max_tool_response_length: values.Positive
    tool_response_truncate_side: Literal["left", "middle", "right"]
    max_consecutive_invalid_tool_calls: values.Positive | None
    tool_timeout: values.Seconds
    tool_retries: values.Natural
    on_tool_failure: Literal["message", "exclude"] | None
    episode_timeout: values.Seconds


class AgentConfig(Section):
    num_workers: values.Positive | None
    default_agent_loop: str
    agent_loop_config_path: str | None
    path: str | None
    name: str
    mode: Literal["inline", "process", "online"]
    concurrency: values.Positive
    turn_discount: values.Share
    forced_tool_choice: Literal["reject", "auto"]
    host: str
    port: values.Port


class RolloutConfig(Section):
    name: str
    mode: Literal["async", "sync"]
    n: values.Positive
    do_sample: bool
    temperature: values.NonNegative
    top_p: values.ShareAboveZero
    top_k: values.TopK
    repetition_penalty: values.AboveZero
    min_tokens: values.Natural
    ignore_eos: bool
    stop: list[str]
    seed: values.Natural
    full_determinism: bool
    prompt_length: values.Positive
    response_length: values.Positive
    dtype: values.DType | None
    tensor_model_parallel_size: values.Positive
    nnodes: values.Natural
    n_gpus_per_node: values.Positive | None
    gpu_memory_utilization: values.ShareAboveZero
    max_model_len: values.Positive | None
    max_num_seqs: values.Positive
    max_num_batched_tokens: values.Positive
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    enforce_eager: bool
    cudagraph_capture_sizes: list[values.Positive]
    free_cache_engine: bool
    calculate_log_probs: bool
    log_prob_micro_batch_size: values.Positive | None
    log_prob_micro_batch_size_per_gpu: values.Positive | None
    log_prob_use_dynamic_bsz: bool
    log_prob_max_token_len_per_gpu: values.Positive
    max_log_prob_gap: values.Limit | None
    request_timeout: values.Seconds
    request_retries: values.Natural
    over_sample_rate: values.NonNegative
    checkpoint_engine: WeightTransferConfig
    engine_kwargs: EngineKwargsConfig
    val_kwargs: ValidationSamplingConfig
    multi_turn: MultiTurnConfig
    agent: AgentConfig


class OffPolicyConfig(Section):
    max_off_policy_threshold: values.Natural
    max_off_policy_strategy: Literal["wait", "drop"]


class V1Config(Section):
    trainer_mode: Literal["sync", "colocate_async", "separate_async"]
    sampler: OffPolicyConfig


# Sampling of an evaluation by name: the keys of `eval` that it sets, unless they are set themselves
PRESETS: dict[str, dict[str, Any]] = {
    "deepseek": {"temperature": 0.6, "top_p": 0.95, "top_k": -1, "max_tokens": 32768},
    "qwen3-thinking": {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 38912},
    "dapo": {"temperature": 1.0, "top_p": 0.7, "top_k": -1},
    "greedy": {"temperature": 0.0, "top_p": 1.0, "top_k": -1},
}


def preset_name(value: str) -> values.ValueFault | None:
    """A rule: a name of a preset."""
    return None if value in PRESETS else values.choices(value, list(PRESETS), list(PRESETS))


class EvalConfig(Section):
    files: RowNames
    models: list[str]
    n: values.Positive | None
    greedy: bool
    k: list[values.Positive]
    preset: Annotated[str, preset_name] | None
    temperature: values.NonNegative | None
    top_p: values.ShareAboveZero | None
    top_k: values.TopK | None
    max_tokens: values.Positive | None
    seed: values.Natural
    output_dir: str | None
    compare: str | None
    resume: bool
    concurrency: values.Positive
    served_model: str | None
    responses: RowNames
    response_key: str
    reward_model_key: str
