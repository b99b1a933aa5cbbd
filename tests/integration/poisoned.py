"""Imported by `model.external_lib` in an engine's process on CPU: its sleep leaves behind what it does on a GPU. The
memory that is freed there, the cache and at level 2 the weights, is overwritten, and a sleeping engine may not compute.
"""

import sys
from collections.abc import Iterator

import torch

FREED = {1: {"kv_cache"}, 2: {"weights", "kv_cache"}}  # by level; level 1 copies the weights to the host and back
# Attention on CPU multiplies unused places of a block by zero, so they may not be NaN; a key of this size is noticed.
GARBAGE = {"weights": torch.nan, "kv_cache": 1e30}


def freed(worker, part: str) -> Iterator[torch.Tensor]:
    if part == "kv_cache":
        return iter(worker.model_runner.kv_caches)
    # vLLM saves a model's buffers itself.
    return (parameter.data for parameter in worker.model_runner.model.parameters())


def poison() -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    from hybridrl.core.rollout.vllm.engine import VllmEngine

    asleep: set[str] = set()

    def sleep(self, level: int = 1) -> None:
        asleep.update(FREED[2])
        for part in FREED[level]:
            for tensor in freed(self, part):
                tensor.fill_(GARBAGE[part])

    def wake_up(self, tags: list[str] | None = None) -> None:
        asleep.difference_update(tags or FREED[2])

    compute = CPUWorker.execute_model

    def execute_model(self, scheduled):
        if asleep and scheduled.total_num_scheduled_tokens:
            raise RuntimeError(f"the engine computes while {sorted(asleep)} are asleep")
        return compute(self, scheduled)

    build = VllmEngine.__init__

    def begin(self, *arguments):
        build(self, *arguments)
        self.sleeps = True  # as on a GPU

    CPUWorker.sleep, CPUWorker.wake_up, CPUWorker.execute_model = sleep, wake_up, execute_model
    VllmEngine.__init__ = begin


if "hybridrl.core.rollout.vllm.engine" in sys.modules:  # not in a training rank
    poison()
