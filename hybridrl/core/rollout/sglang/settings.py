"""Environment of a server with SGLang, and its entry among the engines; does not import it."""

from hybridrl.config.schema import RolloutConfig
from hybridrl.core.rollout.engine import EngineEntry


def sglang_environment(rollout: RolloutConfig) -> dict[str, str]:
    """Return the environment variables of a server with SGLang."""
    return {
        # The longest sequence is rollout.max_model_len, which is checked against the model with the configuration.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # Log-probs of the distribution that was sampled from, before it is truncated: the trainer's.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        # SGLang requires cores, or a memory node, for each process on a CPU; only its own kernels are bound to them.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * rollout.tensor_model_parallel_size),
    }


SGLANG = EngineEntry(
    "hybridrl.core.rollout.sglang.engine",
    "SglangEngine",
    sglang_environment,
    cache_bytes="engine_kwargs.sglang.max_total_tokens",
)
