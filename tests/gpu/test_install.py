"""Properties of an installation for CUDA that show without a GPU: run by scripts/test_cuda_install.sh, with a stub of
the driver's library. Skipped where torch is built for CPU."""

import os
import subprocess
import sys
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridrl.core import device as devices
from hybridrl.required import required

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="torch is built for CPU")

TOP = Path(__file__).parents[2]
MODULES = [
    ".".join(path.relative_to(TOP).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(TOP.glob("hybridrl/**/*.py"))
    if path.name != "__main__.py"
]
# hybridrl's modules, and the compiled libraries of vLLM's whose operators an engine on CUDA calls.
COMPILED = ["vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.cumem_allocator"]


def imported(modules: list[str]) -> str:
    """Import modules in a process of their own; returns the errors, one per line."""
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    try:\n        importlib.import_module(name)\n"
    code += "    except BaseException as error:\n        print(f'{name}: {type(error).__name__}: {error}')"
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, *modules], cwd=TOP, env=environment, capture_output=True, text=True
    )
    return done.stdout + (done.stderr if done.returncode else "")


def test_every_module_imports():
    assert len(MODULES) > 200
    assert imported(MODULES) == ""


def test_the_compiled_libraries_of_vllm_load():
    assert imported(COMPILED) == ""


def test_torch_has_what_device_memory_is_shared_and_host_memory_registered_with():
    runtime = vars(torch._C)["_cudart"]
    assert {"cudaHostRegister", "cudaHostUnregister"} <= set(dir(runtime))
    assert {"_share_cuda_", "_new_shared_cuda", "_release_ipc_counter_cuda"} <= set(dir(torch.UntypedStorage))
    torch.cuda.check_error(0)
    assert devices.libraries().keys() == {"CUDA", "NCCL"}
    assert {"sm_80", "sm_90", "sm_100"} <= set(devices.compiled_architectures())


def test_a_group_by_nccl_can_be_cancelled_and_starts_no_watchdog_with_blocking_wait():
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=5)
    assert options._timeout == timedelta(seconds=5)
    assert {"broadcast", "abort"} <= set(dir(dist.ProcessGroupNCCL))
    library = Path(required(find_spec("torch")).origin).parent / "lib" / "libtorch_cuda.so"
    assert b"TORCH_NCCL_BLOCKING_WAIT is enabled, NO watchdog thread is created." in library.read_bytes()


def test_a_group_by_nccl_is_made_as_the_first_rank_makes_it():
    listener = devices.listen("127.0.0.1")
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(ValueError, match="no GPUs found"):  # the arguments are right
        devices.BroadcastGroup("cuda", address, listener, 0, 1, 5.0)
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
