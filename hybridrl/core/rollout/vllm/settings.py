"""Environment of a server with vLLM, and its entry among the engines; does not import it."""

import os

from hybridrl.config.schema import RolloutConfig
from hybridrl.core.rollout.engine import EngineEntry

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    # The engine computes in the server's own process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Engines that pin themselves to the first cores would compete for them.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # On CPU oneDNN caches a compiled product per number of tokens in an iteration, by default 1024 of 0.3 to 0.7 MB.
    # Continued prompts always have new lengths; 256 entries are enough for the batch sizes of fifty responses.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
}
CPU_BLOCK = 128  # tokens per cache block of vLLM's CPU build


def vllm_environment(rollout: RolloutConfig) -> dict[str, str]:
    """Return the environment variables of a server with vLLM."""
    chosen = {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")}
    if rollout.dtype == "float32":  # Triton rounds the factors of float32 products to TF32 by default
        chosen["TRITON_F32_DEFAULT"] = "ieee"
    return ENVIRONMENT | chosen


VLLM = EngineEntry(
    "hybridrl.core.rollout.vllm.engine",
    "VllmEngine",
    vllm_environment,
    cache_bytes="engine_kwargs.vllm.kv_cache_memory_bytes",
    cpu_block=CPU_BLOCK,
)
