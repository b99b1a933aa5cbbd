"""Arguments of vLLM's engine that a user adds as rollout.engine_kwargs.vllm, judged without importing vLLM; and
rollouts that are continued over steps: what goes with them, and how the age of their tokens is corrected for."""

import ast
import functools
from importlib.util import find_spec
from math import ceil
from pathlib import Path

from hybridrl.config.catalog import ESTIMATORS
from hybridrl.config.checks.model import experts_of, model_settings
from hybridrl.config.findings import Checker, Findings, nearest, show
from hybridrl.config.schema import ActorRolloutRefConfig, PPOConfig
from hybridrl.config.schema_parts import SHIPPED_SHARE, WHOLE_SHARE, RolloutConfig, V1Config
from hybridrl.runs.plugins import names

MODEL, ROLLOUT, KEY = "actor_rollout_ref.model", "actor_rollout_ref.rollout", ".engine_kwargs.vllm"
V1 = "trainer.v1"
REPLAY, FSDP = "actor_rollout_ref.actor.router_replay.mode", "actor_rollout_ref.actor.fsdp_config"
ROUTES = f"{ROLLOUT}.enable_rollout_routing_replay"
PER_TOKEN = "num_experts_per_tok"
COLLECTS_ROUTES = "aux_output_config"  # an argument of vLLM since it returns the experts of every layer
MODE, BOUND, OVER = f"{V1}.trainer_mode", f"{V1}.sampler.max_off_policy_threshold", f"{ROLLOUT}.over_sample_rate"

# Arguments that hybridrl sets, by the key they are set with.
SET_BY = {
    "model": f"{MODEL}.path",
    "trust_remote_code": f"{MODEL}.trust_remote_code",
    "hf_overrides": f"{MODEL}.override_config",
    "enable_sleep_mode": f"{ROLLOUT}.free_cache_engine",
    "tensor_parallel_size": f"{ROLLOUT}.tensor_model_parallel_size",
    "enable_return_routed_experts": ROUTES,
    COLLECTS_ROUTES: ROUTES,
    **{
        name: f"{ROLLOUT}.{name}"
        for name in (
            "dtype", "seed", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill",
            "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization", "cudagraph_capture_sizes",
        )
    },
}  # fmt: skip
WEIGHTS = "weights come from the trainer"
PLACES = "hybridrl starts one engine per tensor-parallel group of devices"
# Arguments that must be as hybridrl sets them, with the reason.
FIXED = {
    "logprobs_mode": "log-probs must be those of the distribution sampled from, or every importance ratio is wrong",
    "skip_tokenizer_init": "the engine works on token ids",
    "load_format": WEIGHTS,
    "weight_transfer_config": WEIGHTS,
    "worker_extension_cls": WEIGHTS,
    "distributed_executor_backend": PLACES,
    "pipeline_parallel_size": PLACES,
    "data_parallel_size": PLACES,
}


def check_engine_name(name: str, findings: Findings) -> None:
    """Reject an engine that is neither hybridrl's nor an installed plug-in's."""
    if name not in (engines := names("engine")):
        findings.error("value", f"choose {' | '.join(engines)}", keys=f"{ROLLOUT}.name", value=name)


def check_engine(rollout: RolloutConfig, check: Checker) -> None:
    """Reject an unknown engine, arguments that hybridrl sets itself, and names that the installed vLLM lacks."""
    check_engine_name(rollout.name, check.findings)
    if options := [name for name in rollout.engine_kwargs.vllm if "lora" in name]:
        cause = f"{ROLLOUT}{KEY}: {', '.join(options)} follow from {MODEL}.lora_rank, which configures"
        keys = [KEY, *(f"{KEY}.{option}" for option in options)]
        check.error(keys, f"{cause} trainer and engine alike", "leave them out", valued=False)
    for name, value in rollout.engine_kwargs.vllm.items():
        if value is None:
            continue
        if key := SET_BY.get(name):
            check.error(
                f"{KEY}.{name} {key}", f"{key} sets it, for trainer and engine alike", f"set {key}={show(value)}"
            )
        elif name in FIXED:
            check.error(f"{KEY}.{name}", FIXED[name], "leave it out")
        elif (known := vllm_arguments()) and name not in known:
            near = nearest(name, sorted(known))
            fix = f"did you mean {' or '.join(near)}?" if near else "leave it out"
            check.error(f"{KEY}.{name}", "the engine of the installed vLLM has no such argument", fix)


@functools.cache
def vllm_arguments() -> frozenset[str]:
    """Return the arguments of the installed vLLM's engine, read from its source: importing it takes seconds. Empty if
    there is no vLLM here."""
    spec = find_spec("vllm")
    file = Path(spec.origin).parent / "engine" / "arg_utils.py" if spec and spec.origin else None
    if file is None or not file.is_file():
        return frozenset()
    classes = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    fields = [
        node.target.id
        for one in classes
        if one.name in ("EngineArgs", "AsyncEngineArgs")
        for node in one.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    return frozenset(fields)


def resolve_router_replay(section: ActorRolloutRefConfig, check: Checker) -> None:
    """Decide whether a mixture is updated with the experts that the engine chose."""
    replay, rollout, settings = section.actor.router_replay, section.rollout, model_settings(section.model)
    prefixes, compiled, off = f"{ROLLOUT}.enable_prefix_caching", f"{FSDP}.compile_layers", f"set {REPLAY}=disabled"
    text, mixture = settings.get("text_config") or settings, experts_of(settings)
    available = vllm_arguments() or [COLLECTS_ROUTES]
    obstacles = (
        (settings and not mixture, f"{MODEL}.path", f"{section.model.path} is no mixture of experts", off),
        (mixture and not text.get(PER_TOKEN), f"{MODEL}.path", f"its config.json does not name {PER_TOKEN}", off),
        (rollout.name != "vllm", f"{ROLLOUT}.name", f"the engine {rollout.name} returns no experts", off),
        (COLLECTS_ROUTES not in available, f"{ROLLOUT}.name", "vLLM returns the experts since 0.32", off),
        (not rollout.enable_prefix_caching, prefixes, "vLLM keeps experts with its prefixes", f"set {prefixes}=true"),
        (section.actor.fsdp_config.compile_layers, compiled, "it is not in compiled layers", f"set {compiled}=false"),
        (rollout.enable_rollout_routing_replay is False, ROUTES, "the engine returns no experts", "leave it out"),
    )
    found = [rest for applies, *rest in obstacles if applies]
    if replay.mode == "auto":
        if not settings and rollout.dtype == "bfloat16":
            cause = f"disabled, as the config.json of {section.model.path} is not on this machine"
            check.warn(f"{REPLAY} {MODEL}.path", cause, f"set {REPLAY}=R3 if it is a mixture")
        replay.mode = "R3" if settings and rollout.dtype == "bfloat16" and not found else "disabled"
    elif replay.mode == "R3":
        for key, cause, fix in found[:1]:
            check.error(f"{REPLAY} {key}", cause, fix)
    if replay.mode == "disabled" and rollout.enable_rollout_routing_replay:
        check.warn(f"{ROUTES} {REPLAY}", "has no effect", f"set {REPLAY}=R3")
    rollout.enable_rollout_routing_replay = replay.mode == "R3"


def continues_rollouts(v1: V1Config, rollout: RolloutConfig) -> bool:
    """Whether a step leaves responses unfinished that later steps continue."""
    return v1.trainer_mode != "sync" or rollout.over_sample_rate > 0


def most_in_flight(v1: V1Config, rollout: RolloutConfig, batch: int) -> int:
    """The most groups that may be started and not trained on yet; a step trains on `batch`."""
    bound = v1.sampler.max_off_policy_threshold
    # With full_determinism engines get all at once, however full they are.
    most = min(bound, 1) if rollout.full_determinism else bound
    return ceil(batch * (1 + (rollout.over_sample_rate or most)))


def resolve_asynchronous(config: PPOConfig, check: Checker) -> None:
    """Choose the correction; add findings about what does not go together."""
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
