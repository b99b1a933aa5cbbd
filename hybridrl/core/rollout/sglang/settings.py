"""What SGLang must be given from outside. Does not import it."""

from hybridrl.config.schema import RolloutConfig
from hybridrl.core.rollout.engine import EngineEntry

ENVIRONMENT = {
    # The longest sequence is rollout.max_model_len, which is checked against the model with the configuration.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    # Log-probs of the distribution that was sampled from, before it is truncated: the trainer's, at its temperature.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
}


def sglang_environment(rollout: RolloutConfig) -> dict[str, str]:
    """Return the environment variables of a server with SGLang."""
    # SGLang wants cores for each process on a CPU, or as many memory nodes; it binds its own kernels alone to them.
    return ENVIRONMENT | {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * rollout.tensor_model_parallel_size)}


SGLANG = EngineEntry(
    "hybridrl.core.rollout.sglang.engine",
    "SglangEngine",
    sglang_environment,
    cache_bytes="engine_kwargs.sglang.max_total_tokens",
)
