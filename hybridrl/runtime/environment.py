"""The environment of worker processes, which libraries read when they are loaded; and the fork server, a process that
imports torch and vLLM while the driver still reads its data, and from which workers on CPU are forked.

Their imports are half of a start-up on two cores: each of them alone takes longer than everything that a worker does
before the first step. On CUDA every worker imports by itself: a process that has looked for GPUs cannot be forked, and
there are cores for all of them. Here none of these libraries is imported.
"""

import os
import platform
import pwd
import secrets
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from typing import Any

from hybridrl.config.findings import ConfigError
from hybridrl.required import required
from hybridrl.runtime import forkserver
from hybridrl.runtime.keeper import PrivateDirectory

# Places of libraries' files below the home directory, by default.
CACHES = {
    "XDG_CACHE_HOME": "cache",
    "XDG_CONFIG_HOME": "config",
    "MPLCONFIGDIR": "matplotlib",
    "TRITON_HOME": "triton",
    "VLLM_CACHE_ROOT": "vllm",
    "VLLM_CONFIG_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "WANDB_CACHE_DIR": "wandb",
    "WANDB_CONFIG_DIR": "wandb",
    "WANDB_DATA_DIR": "wandb",
    "HF_MODULES_CACHE": "huggingface/modules",
    "HF_DATASETS_CACHE": "huggingface/datasets",
}
# How long the threads of a parallel operation spin while they wait for each other (core/spinning.py).
WAITING = {"GOMP_SPINCOUNT": "300000", "OMP_WAIT_POLICY": "PASSIVE"}
# Nothing needs them, but transformers and vLLM import them if installed. Each is built for one torch.
EXTENSIONS = ("torchaudio", "torchcodec")
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def replace_unwritable_home() -> str:
    """Move the caches of libraries to a private directory if this user's home, or its cache, cannot be written, as in
    a container with an arbitrary user. Returns the directory; empty: the home can be used. Models in its cache stay
    usable."""
    home, environment = os.path.expanduser("~"), os.environ
    cache = environment.get("XDG_CACHE_HOME") or f"{home}/.cache"
    if _is_writable(home) and (_is_writable(cache) or not os.path.exists(cache)):
        return ""
    directory = _private_directory()
    models = f"{cache}/huggingface"
    environment.setdefault("HF_HOME", models if os.access(models, os.R_OK | os.X_OK) else f"{directory}/huggingface")
    for name, place in CACHES.items():
        if name not in environment or not _is_writable(environment[name]):
            environment[name] = f"{directory}/{place}"
    if not os.path.isdir(home):
        environment["HOME"] = directory
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:  # torch asks for a name
        environment.setdefault("USER", str(os.getuid()))
    return directory


def _is_writable(path: str) -> bool:
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)


def _private_directory() -> str:
    """Make this user's directory, which is kept, as compiled code in it is used again; a new one if that name is
    another user's."""
    path = f"{gettempdir()}/hybridrl_home_{os.getuid()}"
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        state = os.lstat(path)
    except OSError:
        return mkdtemp(prefix="hybridrl_home_")
    private = state.st_uid == os.getuid() and not os.path.islink(path) and not state.st_mode & 0o077
    return path if private else mkdtemp(prefix="hybridrl_home_")


def joins(ray_init: dict[str, Any]) -> bool:
    """Whether a run joins an existing Ray instead of starting its own."""
    return bool(os.environ.get("RAY_ADDRESS") or ray_init.get("address"))


def ray_token(directory: str) -> dict[str, str]:
    """Make a token in a private directory for a Ray that is started here, and return the variable that names its file,
    unless the user named one. Ray itself would leave it in the home directory, readable by others."""
    if "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ:
        return {}
    path = f"{directory}/ray_token"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return {"RAY_AUTH_TOKEN_PATH": path}


def worker_environment(device: str, slots: int) -> dict[str, str]:
    """Return the variables to set before torch is imported in a worker process; `slots` ranks share the CPU cores."""
    cores = max(len(os.sched_getaffinity(0)) // slots, 1)
    threads = str(cores if device == "cpu" else min(cores, 8))
    common = {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if device == "cuda":
        # By default this cache is in the run's temporary directory, and the next run would compile everything again.
        compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{gettempdir()}/torchinductor_{os.getuid()}")
        gpu = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "TORCHINDUCTOR_CACHE_DIR": compiled}
        return common | gpu | without_expandable_segments()
    # On CPU the few functions that vLLM compiles take seconds of g++ and save nothing.
    return common | {"TORCH_COMPILE_DISABLE": "1", "MKL_NUM_THREADS": threads} | WAITING | _allocator()


def without_expandable_segments() -> dict[str, str]:
    """Return torch's CUDA allocator settings without expandable segments, if they are requested: other processes can
    open such memory only through a file descriptor of the sender, which containers do not allow."""
    settings = {
        name: os.environ[name] for name in ALLOCATOR_SETTINGS if "expandable_segments" in os.environ.get(name, "")
    }
    return {
        name: ",".join(item for item in value.split(",") if not item.strip().startswith("expandable_segments"))
        for name, value in settings.items()
    }


def _allocator() -> dict[str, str]:
    """Return the variables that preload Ray's jemalloc, unless another allocator is preloaded already.
    glibc frees blocks above 32 MiB at once, and the system clears every page before it is used again: writing such a
    tensor takes five times as long as in memory that was kept, and a weight sync twice as long."""
    preloaded, package = os.environ.get("LD_PRELOAD", ""), find_spec("ray")
    library = Path(package.origin).parent / "core" / "libjemalloc.so" if package and package.origin else None
    if "malloc" in preloaded or library is None or not library.exists() or set(" :") & set(str(library)):
        return {}  # a path with a space or colon would be split
    # Freed memory is kept, also large blocks, for the lifetime of the process. jemalloc uses the last value of a key.
    options = ["oversize_threshold:0", "dirty_decay_ms:-1", *filter(None, [os.environ.get("MALLOC_CONF")])]
    return {"LD_PRELOAD": f"{library} {preloaded}".strip(), "MALLOC_CONF": ",".join(options)}


TRAINING = ("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.nn.attention.varlen", "peft")
ENGINES = {
    "vllm": ("vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_model_runner", "vllm.lora.worker_manager"),
    "sglang": ("hybridrl.core.rollout.sglang.stand_ins", "sglang.srt.entrypoints.engine"),
}
# What libraries read when they are loaded.
READ_ONCE = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", *WAITING, "LD_PRELOAD", "MALLOC_CONF", "TORCH_COMPILE_DISABLE")


class ForkServer:
    """The process that workers are forked from, and how Ray starts them."""

    def __init__(self, environment: dict[str, str], modules: tuple[str, ...]) -> None:
        self.environment = environment
        self.directory = PrivateDirectory()
        path, log = f"{self.directory.path}/socket", f"{self.directory.path}/log"
        variables = {"VLLM_LOGGING_LEVEL": "WARNING"} | os.environ | {"OPENBLAS_NUM_THREADS": "1"} | environment
        with open(log, "wb") as output, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(128)
            descriptor = listener.fileno()
            command = [sys.executable, "-P", forkserver.__file__, "serve", str(descriptor), *modules]
            self.process = subprocess.Popen(
                command,
                env=variables | self.directory.environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[descriptor],
            )
        self.launch = shlex.join([sys.executable, "-IS", forkserver.__file__, "launch", path])

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether a worker with this environment may be forked."""
        read = ((name, self.environment[name]) for name in READ_ONCE if name in self.environment)
        return all(environment.get(name, value) == value for name, value in read)

    def close(self) -> None:
        """End the process, and all workers that are left."""
        required(self.process.stdin).close()
        self.directory.close()
        self.process.wait()


@contextmanager
def fork_server(device: str, ray_init: dict, devices: int, *, engine: str) -> Iterator[ForkServer | None]:
    """The fork server of a run on this machine's CPU with this number of devices, for the time of the block; None for
    any other run."""
    if device != "cpu" or joins(ray_init) or sys.platform != "linux":
        yield None
        return
    environment = worker_environment("cpu", devices)
    server = ForkServer(environment, TRAINING + ENGINES.get(engine, ()))
    try:
        yield server
    finally:
        server.close()


def reject_foreign_builds(machine: str = platform.machine()) -> None:
    """Raise ConfigError if EXTENSIONS are builds for CUDA and torch is one for CPUs: transformers then fails to
    import models. On x86 the builds of the Python Package Index are for CUDA; others have their kind in the version.
    Such a torchvision needs hybridrl_torchvision, which the wheel and scripts/install.sh install."""
    builds, extensions = {}, EXTENSIONS if "hybridrl_torchvision" in sys.modules else ("torchvision", *EXTENSIONS)
    for name in ("torch", *extensions):
        with suppress(PackageNotFoundError):
            builds[name] = version(name)
    foreign = [name for name in extensions if "+" not in builds.get(name, "+")]
    if machine == "x86_64" and builds.get("torch", "").endswith("+cpu") and foreign:
        named = ", ".join(f"{name} {builds[name]}" for name in foreign)
        cause = f"{named}: built for CUDA, and torch {builds['torch']} is not, so that models cannot be imported"
        raise ConfigError(cause, fix=f"pip uninstall -y {' '.join(foreign)}   (text models need none of them)")
