"""Arguments of vLLM's engine that a user adds as rollout.engine_kwargs.vllm, judged without importing vLLM."""

import ast
import functools
from importlib.util import find_spec
from pathlib import Path

from hybridrl.config.findings import Checker, Findings, show
from hybridrl.config.keys import nearest
from hybridrl.config.schema import RolloutConfig
from hybridrl.runs.plugins import names

MODEL, ROLLOUT, KEY = "actor_rollout_ref.model", "actor_rollout_ref.rollout", ".engine_kwargs.vllm"

# Arguments that hybridrl sets, by the key they are set with.
SET_BY = {
    "model": f"{MODEL}.path",
    "trust_remote_code": f"{MODEL}.trust_remote_code",
    "hf_overrides": f"{MODEL}.override_config",
    "enable_sleep_mode": f"{ROLLOUT}.free_cache_engine",
    "tensor_parallel_size": f"{ROLLOUT}.tensor_model_parallel_size",
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
