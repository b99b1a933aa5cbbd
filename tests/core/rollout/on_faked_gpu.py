"""Prints the configuration that vLLM derives from hybridrl's arguments on a faked machine with H100s.

    python on_faked_gpu.py MODEL [[KEY=VALUE, ...], ...]     as JSON; prints a JSON list, one entry per run

The platform is faked after vLLM is imported: what vLLM decides during its import is decided for this machine.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pynvml
from vllm import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from hybridrl.config import load_ppo_config
from hybridrl.core.rollout.vllm.engine import vllm_arguments

GPUS = 8
COMPILED = "vllm._C_stable_libtorch"  # imported for its side effects; a CPU's build has none


def fake_gpus() -> None:
    pynvml.nvmlInit = pynvml.nvmlShutdown = lambda: None
    pynvml.nvmlDeviceGetCount = lambda: GPUS
    try:
        import_module(COMPILED)
    except ImportError:
        sys.modules[COMPILED] = ModuleType(COMPILED)
    cuda = import_module("vllm.platforms.cuda").NonNvmlCudaPlatform
    facts = {
        "get_device_capability": lambda cls, device_id=0: DeviceCapability(9, 0),
        "get_device_name": lambda cls, device_id=0: "NVIDIA H100 80GB HBM3",
        "get_device_total_memory": lambda cls, device_id=0: 80 << 30,
        "device_count": lambda cls: GPUS,
        "num_compute_units": lambda cls, device_id=0: 132,
        "is_cumem_allocator_available": lambda cls: True,
    }
    methods = {name: classmethod(function) for name, function in facts.items()}
    current_platform.__class__ = type("FakedH100", (cuda,), methods)  # other modules hold this object


def configuration(model: str, further: list[str]) -> dict[str, object]:
    rows = Path(model) / "rows.jsonl"
    rows.write_text("{}\n")
    config = load_ppo_config([f"data.train_files={rows}", f"actor_rollout_ref.model.path={model}", *further])
    arguments = vllm_arguments(
        config.trainer.device, config.actor_rollout_ref.model, config.actor_rollout_ref.rollout, GPUS
    )
    made = AsyncEngineArgs(**arguments).create_engine_config()
    lora, attention = made.lora_config, made.attention_config.backend
    return {
        "device": made.device_config.device_type,
        "worker": made.parallel_config.worker_cls,
        "executor": made.parallel_config.distributed_executor_backend,
        "tensor_parallel": made.parallel_config.tensor_parallel_size,
        "extension": made.parallel_config.worker_extension_cls,
        "dtype": str(made.model_config.dtype),
        "sleeps": made.model_config.enable_sleep_mode,
        "log_probs": made.model_config.logprobs_mode,
        "weights_by": made.weight_transfer_config.backend,
        "load_format": made.load_config.load_format,
        "chunked": made.scheduler_config.enable_chunked_prefill,
        "tokens": made.scheduler_config.max_num_batched_tokens,
        "cache_share": made.cache_config.gpu_memory_utilization,
        "cache_bytes": made.cache_config.kv_cache_memory_bytes,
        "graphs": made.compilation_config.cudagraph_mode.name,
        "rank": lora.max_lora_rank if lora else None,
        "attention": attention.name if attention else None,
    }


if __name__ == "__main__":
    fake_gpus()
    print(json.dumps([configuration(sys.argv[1], further) for further in json.loads(sys.argv[2])]))
