"""Checks of a user's arguments for an engine (rollout.engine_kwargs.<engine>), without importing the engine; and of
rollouts that continue over steps: compatible settings, and the correction for the age of their tokens."""

import ast
import functools
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any

from hybridrl.config.catalog import ESTIMATORS
from hybridrl.config.checks.model import experts_of, model_settings
from hybridrl.config.findings import Checker, Findings, nearest, show
from hybridrl.config.schema import ActorRolloutRefConfig, PPOConfig, SFTTrainerConfig
from hybridrl.config.schema_parts import SHIPPED_SHARE, WHOLE_SHARE, RolloutConfig, V1Config
from hybridrl.plugins import names

MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
V1 = "trainer.v1"
REPLAY, FSDP = "actor_rollout_ref.actor.router_replay.mode", "actor_rollout_ref.actor.fsdp_config"
ROUTES = f"{ROLLOUT}.enable_rollout_routing_replay"
PER_TOKEN = "num_experts_per_tok"
IMAGES, TAKES_PICTURES = f"{ROLLOUT}.limit_images", "mm_device_do_normalize"  # an argument of vLLM since it takes them
EPISODE_PICTURES = 16  # the most in a context of several turns, unless it is set
COLLECTS_ROUTES = "aux_output_config"  # an argument of vLLM since it returns the experts of every layer
MODE, BOUND, OVER = f"{V1}.trainer_mode", f"{V1}.sampler.max_off_policy_threshold", f"{ROLLOUT}.over_sample_rate"

WEIGHTS = "weights come from the trainer"
PLACES = "hybridrl starts one engine per tensor-parallel group of devices"
TOKENS = "the engine works on token ids"


@dataclass(frozen=True)
class EngineArguments:
    """Arguments of an engine. `set_by`: the key that sets an argument; `fixed`: arguments that must stay as hybridrl
    sets them, with the reason. `files`: the engine's sources with a class field for each argument."""

    title: str
    set_by: dict[str, str]
    fixed: dict[str, str]
    files: str

    @functools.cached_property
    def known(self) -> frozenset[str]:
        """Argument names of the installed engine, read from its source, since importing takes seconds. Empty if it is
        not installed."""
        package, _, pattern = self.files.partition("/")
        spec = find_spec(package)
        files = Path(spec.origin).parent.glob(pattern) if spec and spec.origin else ()
        nodes = [node for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body]
        fields = [field for node in nodes if isinstance(node, ast.ClassDef) for field in node.body]
        targets = [field.target for field in fields if isinstance(field, ast.AnnAssign)]
        return frozenset(target.id for target in targets if isinstance(target, ast.Name))


VLLM = EngineArguments(
    "vLLM",
    {
        "model": f"{MODEL}.path",
        "trust_remote_code": f"{MODEL}.trust_remote_code",
        "hf_overrides": f"{MODEL}.override_config",
        "enable_sleep_mode": f"{ROLLOUT}.free_cache_engine",
        "tensor_parallel_size": f"{ROLLOUT}.tensor_model_parallel_size",
        "enable_return_routed_experts": ROUTES,
        COLLECTS_ROUTES: ROUTES,
        "limit_mm_per_prompt": IMAGES,
        **{
            name: f"{ROLLOUT}.{name}"
            for name in (
                "dtype", "seed", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill",
                "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization", "cudagraph_capture_sizes",
            )
        },
    },
    {
        "logprobs_mode": "log-probs must be those of the distribution sampled from, or every importance ratio is wrong",
        "skip_tokenizer_init": TOKENS,
        **dict.fromkeys(("load_format", "weight_transfer_config", "worker_extension_cls"), WEIGHTS),
        **dict.fromkeys(("distributed_executor_backend", "pipeline_parallel_size", "data_parallel_size"), PLACES),
    },
    "vllm/engine/arg_utils.py",
)  # fmt: skip
SGLANG = EngineArguments(
    "SGLang",
    {
        "model_path": f"{MODEL}.path",
        "tokenizer_path": f"{MODEL}.tokenizer_path",
        "trust_remote_code": f"{MODEL}.trust_remote_code",
        "json_model_override_args": f"{MODEL}.override_config",
        "device": "trainer.device",
        "dtype": f"{ROLLOUT}.dtype",
        "random_seed": f"{ROLLOUT}.seed",
        "tp_size": f"{ROLLOUT}.tensor_model_parallel_size",
        "context_length": f"{ROLLOUT}.max_model_len",
        "max_running_requests": f"{ROLLOUT}.max_num_seqs",
        "max_prefill_tokens": f"{ROLLOUT}.max_num_batched_tokens",
        "disable_radix_cache": f"{ROLLOUT}.enable_prefix_caching",
        "disable_cuda_graph": f"{ROLLOUT}.enforce_eager",
        "cuda_graph_bs": f"{ROLLOUT}.cudagraph_capture_sizes",
        "cuda_graph_bs_decode": f"{ROLLOUT}.cudagraph_capture_sizes",
        "mem_fraction_static": f"{ROLLOUT}.gpu_memory_utilization",
        "enable_memory_saver": f"{ROLLOUT}.free_cache_engine",
    },
    {
        "chunked_prefill_size": f"{ROLLOUT}.max_num_batched_tokens sets it, or .enable_chunked_prefill=false",
        "sampling_backend": "pytorch is the one that samples by the seed of each request",
        "enable_return_routed_experts": "the experts that SGLang chose are not replayed yet",
        "skip_tokenizer_init": TOKENS,
        **dict.fromkeys(("load_format", "custom_weight_loader", "enable_weights_cpu_backup"), WEIGHTS),
        **dict.fromkeys(
            ("dp_size", "attn_dp_size", "pp_size", "nnodes", "node_rank", "dist_init_addr", "base_gpu_id",
             "gpu_id_step", "use_ray", "disaggregation_mode", "tokenizer_worker_num", "detokenizer_worker_num"), PLACES
        ),
    },
    "sglang/srt/arg_groups/fields/*.py",
)  # fmt: skip
ENGINES = {"vllm": VLLM, "sglang": SGLANG}
UNTRUNCATED = ("sglang",)  # engines with log-probs of the distribution before truncation by top_p and top_k
# SGLang's implementations of attention for devices that hybridrl does not support.
ELSEWHERE = {"ascend": "NPUs", "aiter": "AMD's GPUs", "wave": "AMD's GPUs", "intel_xpu": "Intel's GPUs"}
BATCH_INVARIANT = "enable_deterministic_inference"


def check_engine_name(name: str, findings: Findings) -> None:
    """Reject an engine that neither hybridrl nor an installed plug-in provides."""
    if name not in (engines := names("engine")):
        findings.error("value", f"choose {' | '.join(engines)}", keys=f"{ROLLOUT}.name", value=name)


def check_engine(rollout: RolloutConfig, trainer: SFTTrainerConfig, check: Checker) -> None:
    """Reject unknown engines, arguments that hybridrl sets itself, and names missing in the installed engine."""
    check_engine_name(rollout.name, check.findings)
    for name, engine in ENGINES.items():
        key, arguments = f".engine_kwargs.{name}", vars(rollout.engine_kwargs)[name]
        if rollout.name in ENGINES and rollout.name != name:
            if arguments:
                check.idle(f"{key} .name", f"with {ROLLOUT}.name={rollout.name}")
            continue
        if options := [option for option in arguments if "lora" in option]:
            cause = f"{ROLLOUT}{key}: {', '.join(options)} follow from {MODEL}.lora_rank, which configures"
            keys = [key, *(f"{key}.{option}" for option in options)]
            check.error(keys, f"{cause} trainer and engine alike", "leave them out", valued=False)
        for option, value in arguments.items():
            if value is not None:
                _check_argument(engine, f"{key}.{option}", option, value, check)
    if rollout.name == "sglang":
        _check_sglang(rollout, trainer, check)
    if rollout.limit_images and (reason := why_no_pictures(rollout.name)):
        check.error(".limit_images .name", reason)


def why_no_pictures(engine: str) -> str:
    """Return the reason why prompts of this engine cannot have pictures; empty if they can."""
    if engine == "sglang":
        return "SGLang is not given pictures yet, vLLM is"
    older = engine == "vllm" and VLLM.known and TAKES_PICTURES not in VLLM.known
    return "vLLM takes pictures since 0.32" if older else ""


def _check_argument(engine: EngineArguments, key: str, name: str, value: Any, check: Checker) -> None:
    if setter := engine.set_by.get(name):
        shown = show(not value if name.startswith("disable_") and ".enable_" in setter else value)
        check.error(f"{key} {setter}", f"{setter} sets it, for trainer and engine alike", f"set {setter}={shown}")
    elif name in engine.fixed:
        check.error(key, engine.fixed[name], "leave it out")
    elif engine.known and name not in engine.known:
        near = nearest(name, sorted(engine.known))
        fix = f"did you mean {' or '.join(near)}?" if near else "leave it out"
        check.error(key, f"the engine of the installed {engine.title} has no such argument", fix)


def _check_sglang(rollout: RolloutConfig, trainer: SFTTrainerConfig, check: Checker) -> None:
    """Check SGLang's attention on this device, and whether its responses are reproducible."""
    key, options, on_cpu = ".engine_kwargs.sglang", rollout.engine_kwargs.sglang, trainer.device == "cpu"
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        used = options.get(name)
        fix = f"set {'torch_native' if on_cpu else 'fa3, flashinfer or triton'}, or leave it out"
        if used in ELSEWHERE:
            check.error(f"{key}.{name}", f"this attention is for {ELSEWHERE[used]}", fix)
        elif on_cpu and used not in (None, "torch_native"):
            check.error(f"{key}.{name} trainer.device", "SGLang does not compute it on CPU", fix)
    if on_cpu and options.get(BATCH_INVARIANT):
        check.error(f"{key}.{BATCH_INVARIANT} trainer.device", "SGLang has its kernels on CUDA only", "leave it out")
    asked = "trainer.deterministic" if trainer.deterministic else f"{ROLLOUT}.full_determinism"
    if not on_cpu and (trainer.deterministic or rollout.full_determinism) and not options.get(BATCH_INVARIANT):
        cause = "SGLang's responses may still differ from run to run, as its kernels depend on what else is in a batch"
        check.warn(f"{asked} {key}.{BATCH_INVARIANT}", cause, f"set +{ROLLOUT}{key}.{BATCH_INVARIANT}=true")


def resolve_router_replay(section: ActorRolloutRefConfig, check: Checker) -> None:
    """Decide whether a mixture is updated with the experts that the engine chose."""
    replay, rollout, settings = section.actor.router_replay, section.rollout, model_settings(section.model)
    prefixes, compiled, off = f"{ROLLOUT}.enable_prefix_caching", f"{FSDP}.compile_layers", f"set {REPLAY}=disabled"
    text, mixture = settings.get("text_config") or settings, experts_of(settings)
    available = VLLM.known or [COLLECTS_ROUTES]
    obstacles = (
        (settings and not mixture, f"{MODEL}.path", f"{section.model.path} is not a mixture of experts", off),
        (mixture and not text.get(PER_TOKEN), f"{MODEL}.path", f"its config.json does not name {PER_TOKEN}", off),
        (rollout.name != "vllm", f"{ROLLOUT}.name", f"the experts that {rollout.name} chose are not replayed yet", off),
        (COLLECTS_ROUTES not in available, f"{ROLLOUT}.name", "vLLM returns the experts since 0.32", off),
        (not rollout.enable_prefix_caching, prefixes, "vLLM keeps experts with its prefixes", f"set {prefixes}=true"),
        (section.actor.fsdp_config.compile_layers, compiled, "it is not in compiled layers", f"set {compiled}=false"),
        (rollout.enable_rollout_routing_replay is False, ROUTES, "the engine returns no experts", "leave it out"),
    )
    failed = [rest for applies, *rest in obstacles if applies]
    if replay.mode == "auto":
        if not settings and rollout.dtype == "bfloat16" and rollout.name == "vllm":
            cause = f"disabled, as the config.json of {section.model.path} is not on this machine"
            check.warn(f"{REPLAY} {MODEL}.path", cause, f"set {REPLAY}=R3 if it is a mixture")
        replay.mode = "R3" if settings and rollout.dtype == "bfloat16" and not failed else "disabled"
    elif replay.mode == "R3":
        for key, cause, fix in failed[:1]:
            check.error(f"{REPLAY} {key}", cause, fix)
    if replay.mode == "disabled" and rollout.enable_rollout_routing_replay:
        check.warn(f"{ROUTES} {REPLAY}", "has no effect", f"set {REPLAY}=R3")
    rollout.enable_rollout_routing_replay = replay.mode == "R3"


def continues_rollouts(v1: V1Config, rollout: RolloutConfig) -> bool:
    """Whether a step leaves responses unfinished that later steps continue."""
    return v1.trainer_mode != "sync" or rollout.over_sample_rate > 0


def most_in_flight(v1: V1Config, rollout: RolloutConfig, batch: int) -> int:
    """The maximum of groups that are started and not trained on yet; a step trains on `batch`."""
    bound = v1.sampler.max_off_policy_threshold
    # With full_determinism, engines get all groups at once.
    most = min(bound, 1) if rollout.full_determinism else bound
    return ceil(batch * (1 + (rollout.over_sample_rate or most)))


def resolve_asynchronous(config: PPOConfig, check: Checker) -> None:
    """Choose the correction; add findings about incompatible settings."""
    v1, rollout, correction = config.trainer.v1, config.actor_rollout_ref.rollout, config.algorithm.rollout_correction
    continued = continues_rollouts(v1, rollout)
    off_policy = continued and v1.sampler.max_off_policy_threshold > 0
    chosen = correction.rollout_is
    if chosen == "auto":
        correction.rollout_is = "token" if off_policy and not correction.bypass_mode else None
    if config.separate and rollout.gpu_memory_utilization == SHIPPED_SHARE:
        rollout.gpu_memory_utilization = WHOLE_SHARE
    if rollout.nnodes and not config.separate:
        check.idle(f"{ROLLOUT}.nnodes {MODE}", f"without {MODE}=separate_async")
    if not continued:
        return
    _check_continued(config, check)
    if off_policy and chosen is None and not correction.bypass_mode:
        key = "algorithm.rollout_correction.rollout_is"
        cause = f"tokens up to {v1.sampler.max_off_policy_threshold} steps old are trained on as if they were new"
        check.warn(f"{key} {BOUND} {MODE}", cause, f"set {key}=token")


def _check_continued(config: PPOConfig, check: Checker) -> None:
    v1, rollout = config.trainer.v1, config.actor_rollout_ref.rollout
    key = OVER if v1.trainer_mode == "sync" else MODE
    if v1.sampler.max_off_policy_strategy == "drop":
        name = f"{V1}.sampler.max_off_policy_strategy"
        cause = f"wait is used for {name}=drop, which removes long responses more often than short ones: fewer prompts "
        check.warn(f"{name} {key}", f"{cause}are started, and all are trained on", valued=False)
        v1.sampler.max_off_policy_strategy = "wait"
    if config.data.curriculum != "off":
        cause = "prompts of an epoch are sampled before all rewards of the one before are known"
        check.error(f"data.curriculum {key}", cause, "set data.curriculum=off")
    estimator = ESTIMATORS.get(config.algorithm.adv_estimator)
    if estimator is not None and "greedy_rewards" in estimator.reads:
        cause = f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares with a greedy response of the same "
        check.error(f"{key} algorithm.adv_estimator", f"{cause}weights", f"set {MODE}=sync and {OVER}=0")
    if config.reward.num_workers == 0:
        cause = "the reward would be computed between the requests of the engines"
        check.error(f"reward.num_workers {key}", cause, "leave it at null")
    if rollout.full_determinism:
        name, (machines, devices) = f"{ROLLOUT}.full_determinism", config.rollout_pool
        engines = machines * devices // rollout.tensor_model_parallel_size
        if config.data.train_batch_size % engines:
            cause = f"with {name}=true each of the {engines} engines has its share of the prompts"
            check.error(f"data.train_batch_size {name} {key}", cause, f"set a multiple of {engines}")
        if config.algorithm.filter_groups.enable:
            cause = f"the shares of the engines would differ with {name}=true"
            check.error(f"algorithm.filter_groups.enable {name} {key}", cause, f"set {name}=false")
