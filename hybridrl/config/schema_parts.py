"""The sections `algorithm`, `reward`, `rollout` and `eval` of the configuration, the policy loss, rollouts that
continue over steps, and the address of a Ray cluster; see schema.py."""

import math
import os
import re
from dataclasses import make_dataclass
from typing import Annotated, Any, Literal

from hybridrl.config import values
from hybridrl.config.catalog import BYPASS_LOSSES, ESTIMATOR_NAMES, POLICY_LOSS_NAMES, parameter_types
from hybridrl.config.files import ModelPath, RowNames, Script
from hybridrl.config.judge import JudgeConfig, server_parameters
from hybridrl.config.values import Section, ValueFault

SHIPPED_SHARE, WHOLE_SHARE = 0.5, 0.9  # share of GPU memory for an engine: by default, and without a trainer
RAY_ADDRESS, LARGEST_PORT = re.compile(r"auto|local|([^\s/:@]+|\[[\w:.%]+\]):(?P<port>\d{1,9})"), 65535

PolicyLossConfig = make_dataclass(
    "PolicyLossConfig",
    [("loss_mode", Annotated[str, values.name_or_function(POLICY_LOSS_NAMES)]), *parameter_types()],
    namespace={"__module__": __name__},
)


class KLControlConfig(Section):
    type: Literal["fixed", "adaptive"]
    kl_coef: values.NonNegative
    horizon: values.Positive
    target_kl: values.AboveZero


class FilterGroupsConfig(Section):
    enable: bool
    metric: str | None
    max_num_gen_batches: int


# Estimates of the divergence that may reject tokens or rows: verl's names (August 2026).
RejectionForm = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
]  # fmt: skip


def ratio_bounds(text: str) -> tuple[float | None, float]:
    """Bounds of a ratio of probabilities, "upper" or "lower_upper", as (lower or None, upper). Raises ValueError, with
    a message for the user, unless 0 < lower <= 1 <= upper: equal probabilities are never out of bounds."""
    *lower, upper = (_number(part) for part in text.split("_"))
    if len(lower) > 1 or not all(0 < bound <= 1 for bound in lower) or not 1 <= upper < math.inf:
        raise ValueError(
            f"{text!r} does not bound a ratio of probabilities: give an upper bound of at least 1, such as 2.0, or a "
            f"lower and an upper one around 1, such as '0.5_5.0' (0.5_5 without quotes is read as the number 0.55)"
        )
    return (lower[0] if lower else None), upper


def rejection_bounds(form: str, text: str) -> tuple[float | None, float]:
    """Bounds of an estimate (for k1, of a ratio); ValueError with a message for the user."""
    if form.endswith("k1"):
        lower, upper = ratio_bounds(text)
        return (1 / upper if lower is None else lower), upper
    if not 0 < _number(text) < math.inf:
        raise ValueError(f"{text!r} does not bound {form}: give one positive number, such as 0.01")
    return None, _number(text)


def _number(text: str) -> float:
    """NaN if the text is not a number; Python parses 0.5_2 as 0.52."""
    try:
        return math.nan if "_" in text else float(text)
    except ValueError:
        return math.nan


def bounds_ratio(value: str) -> ValueFault | None:
    """A rule: bounds of a ratio of probabilities."""
    try:
        ratio_bounds(value)
    except ValueError as error:
        return ValueFault(str(error))
    return None


class RolloutCorrectionConfig(Section):
    rollout_is: Literal["auto", "token", "sequence", "geometric"] | None
    rollout_is_threshold: Annotated[str, bounds_ratio] | None
    rollout_is_batch_normalize: bool
    rollout_rs: Annotated[list[RejectionForm], values.Commas()]
    rollout_rs_threshold: Annotated[list[str], values.Commas()]
    bypass_mode: bool
    loss_type: Literal[tuple(BYPASS_LOSSES)]  # pyrefly: ignore[invalid-literal]  # known in one place

    @property
    def weight_bounds(self) -> tuple[float | None, float]:
        return ratio_bounds(self.rollout_is_threshold or "")

    @property
    def rejections(self) -> list[tuple[str, float | None, float]]:
        """Each form with its bounds; a single pair of bounds applies to all. ValueError with a message for the user."""
        forms, texts = list(dict.fromkeys(self.rollout_rs)), self.rollout_rs_threshold
        if forms and len(texts) not in (1, len(forms)):
            example = ",".join("0.5_2.0" if form.endswith("k1") else "0.01" for form in forms)
            fix = f"give one for all or one for each, such as '{example}'"
            raise ValueError(f"{len(texts)} bounds for rollout_rs={','.join(forms)}: {fix}")
        texts = texts if len(texts) > 1 else texts * len(forms)
        return [(form, *rejection_bounds(form, text)) for form, text in zip(forms, texts, strict=False)]


class AlgorithmConfig(Section):
    adv_estimator: Annotated[str, values.name_or_function(ESTIMATOR_NAMES)]
    gamma: values.Share
    lam: values.Share
    norm_adv_by_std_in_grpo: bool
    gdpo_reward_keys: list[str]
    gdpo_reward_weights: list[float]
    filter_groups: FilterGroupsConfig
    mask_truncated: bool
    rollout_correction: RolloutCorrectionConfig
    use_kl_in_reward: bool
    kl_penalty: values.KLForm
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
    memory_limit_mb: values.Positive


class OverlongBufferConfig(Section):
    enable: bool
    len: values.Natural
    penalty_factor: values.NonNegative
    log: bool


class RewardKwargsConfig(Section):
    max_resp_len: values.Positive
    overlong_buffer_cfg: OverlongBufferConfig


class SamplerConfig(Section):
    class_path: Script | None
    class_name: str | None


class PairsConfig(Section):
    center: values.NonNegative | None  # in a resolved configuration a number only where a reward model is trained


Curriculum = Annotated[Literal["off", "medium", "easy_first"], values.Means({"false": "off"})]  # off is false in YAML
Scorer = Literal["gsm8k", "countdown", "multiple_choice", "search_qa", "math", "math_dapo", "geo3k", "code", "none"]
NO_SOURCE = "unknown"  # the data source of a row that names none; there is no built-in scorer for this name


class RewardModelConfig(Section):
    enable: bool
    model_path: ModelPath | None
    weight: float
    truncation: Literal["error", "left"]


class RewardConfig(Section):
    name: Scorer | None
    num_workers: values.Natural
    timeout: values.Seconds
    memory_mb: values.Positive | None
    retries: values.Natural
    on_error: Literal["exclude", "zero", "stop"]
    max_fault_rate: values.Share
    max_fault_steps: values.Positive
    functions: dict[str, Any]
    weights: dict[str, Any]
    add_environment_reward: bool
    scale: float
    clip_range: list[Annotated[float, values.Infinite()]]
    max_concurrent: values.Positive
    max_rpm: values.AboveZero | None
    max_tpm: values.AboveZero | None
    estimated_tokens_per_request: values.Positive
    custom_reward_function: CustomRewardConfig
    reward_manager: RewardManagerConfig
    sandbox_fusion: SandboxConfig
    judge: JudgeConfig
    reward_model: RewardModelConfig
    reward_kwargs: RewardKwargsConfig

    @property
    def server_parameters(self) -> dict[str, bool]:
        """verl's parameters for a model's server that the custom function names, and whether it needs them."""
        return server_parameters(self.custom_reward_function.path, self.custom_reward_function.name)

    @property
    def judged(self) -> bool:
        """Whether the judge scores responses: next to a function that calls its server itself only with a weight."""
        return bool(self.judge.base_url) and ("judge" in self.weights or not self.server_parameters)


class ValidationSamplingConfig(Section):
    n: values.Positive
    do_sample: bool
    temperature: values.NonNegative
    top_p: values.ShareAboveZero
    top_k: values.TopK


class EngineKwargsConfig(Section):
    vllm: dict[str, Any]
    sglang: dict[str, Any]


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
    limit_images: values.Natural | None
    enable_rollout_routing_replay: bool | None
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


def ray_options(value: dict[str, Any]) -> ValueFault | None:
    """A rule: the address of an existing Ray cluster, here or in RAY_ADDRESS, must be one for drivers."""
    address = str(value.get("address") or os.environ.get("RAY_ADDRESS") or "auto")
    match = RAY_ADDRESS.fullmatch(address)
    if match and int(match["port"] or 0) <= LARGEST_PORT:
        return None
    name = "address" if value.get("address") else "RAY_ADDRESS"
    host = re.split(r"[/:@\s]", address.partition("://")[2] or address)[0] or "HOST"
    cause = f"{name}={address} is not the HOST:PORT at which a Ray is joined (http:// is its dashboard's)"
    fix = f"set {name}={host}:6379, with the port of ray start, or unset it to have a Ray started here"
    return ValueFault(cause, fix, absent=True)


RayOptions = Annotated[dict[str, Any], ray_options]
