"""A trace of an update by torch's profiler in the training rank, and the seconds of its kernels by kind."""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridrl.core.training.worker import TrainWorker

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace's events
# The first kind of which a part is in a kernel's name; other kernels are elementwise operations and reductions.
KINDS = {
    "attention": ("flash", "fmha"),
    "matrix products": ("nvjet", "gemm", "cutlass"),
    "logit kernels": ("_outputs", "_gradient"),
    # Before the optimizer: FSDP copies many tensors at once by the same means, multi_tensor_apply.
    "copies": ("Mem", "copy", "CopyFunctor", "CatArray", "chunk_cat"),
    "optimizer": ("multi_tensor_apply",),
}
OTHER = "elementwise operations and reductions"


def record_next_update(worker: TrainWorker, file: str) -> None:
    """Write a trace of the rank's next update of the policy to a file; runs in the rank."""
    learner, plain = worker.actor, worker.actor.update

    def recorded(*arguments: Any, **options: Any) -> Any:
        learner.update = plain
        activities = torch.profiler.supported_activities()
        with torch.profiler.profile(activities=activities) as profile:
            result = plain(*arguments, **options)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        profile.export_chrome_trace(file)
        return result

    learner.update = recorded


@dataclass(frozen=True)
class Busy:
    """Seconds from the first to the last kernel of a trace, those in which any of them ran, and by kind."""

    span: float
    busy: float
    launches: int
    kinds: dict[str, float]

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {1e3 * seconds:.0f}" for kind, seconds in self.kinds.items())
        return f"{1e3 * self.busy:.0f} of {1e3 * self.span:.0f} ms in {self.launches:,} launches: {kinds} ms"


def read_trace(file: Path) -> Busy | None:
    """Return what the device did in a trace; None if it has no kernels, as on a CPU."""
    events = [one for one in json.loads(file.read_text())["traceEvents"] if one.get("cat") in ON_DEVICE]
    if not events:
        return None
    busy = end = 0.0
    kinds: dict[str, float] = defaultdict(float)
    for event in sorted(events, key=lambda event: event["ts"]):
        begin, until = event["ts"], event["ts"] + event["dur"]
        busy += max(until - max(begin, end), 0.0)  # kernels of several streams may overlap
        end = max(end, until)
        kinds[kind_of(event["name"])] += event["dur"] / 1e6
    span = end - min(event["ts"] for event in events)
    ordered = dict(sorted(kinds.items(), key=lambda item: -item[1]))
    return Busy(span / 1e6, busy / 1e6, len(events), ordered)


def kind_of(kernel: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in kernel for part in parts)), OTHER)
