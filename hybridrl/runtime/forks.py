"""Workers on CPU are forked from a process that imports torch and vLLM while the driver still reads its data.

Their imports are half of a start-up on two cores: each of them alone takes longer than everything that a worker does
before the first step. On CUDA every worker imports by itself: a process that has looked for GPUs cannot be forked, and
there are cores for all of them.
"""

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hybridrl.config.schema import SFTTrainerConfig
from hybridrl.core.required import required
from hybridrl.runtime import forkserver
from hybridrl.runtime.environment import WAITING, joins, worker_environment
from hybridrl.runtime.keeper import PrivateDirectory

TRAINING = ("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.nn.attention.varlen", "peft")
ENGINE = ("vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_model_runner", "vllm.lora.worker_manager")
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
def fork_server(
    trainer: SFTTrainerConfig, ray_init: dict, devices: int, *, engine: bool
) -> Iterator[ForkServer | None]:
    """The fork server of a run on this machine's CPU with so many devices, for the time of the block; None for any
    other run."""
    if trainer.device != "cpu" or joins(ray_init) or sys.platform != "linux":
        yield None
        return
    environment = worker_environment("cpu", devices)
    server = ForkServer(environment, TRAINING + ENGINE * engine)
    try:
        yield server
    finally:
        server.close()
