"""Load verl's checkpoints: tensors through torch.distributed.checkpoint, the driver's state from the data loader's.

The reader presents verl's files as if torch.distributed.checkpoint had written them: any number of ranks each read
their own shards, without another copy on disk.
"""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from hybridrl.checkpoint.pickles import load
from hybridrl.checkpoint.tensors import Tensors, reading
from hybridrl.checkpoint.verl.tensors import DATA, OPTIMIZER, holds_verl, read_moments, read_verl_model
from hybridrl.config import ConfigError
from hybridrl.config.files import HUGGINGFACE

HEAD = "lm_head.weight"
UPDATES = "extra.updates"

# What is not restored, and why.
NOT_FROM_VERL = {
    "trackers": "verl's own; here they start after this step",
    "random state": "verl's own; here every draw follows from the seed and its position in the run",
}
NO_KL_WEIGHT = {"KL weight": "not saved by verl; it starts at algorithm.kl_ctrl.kl_coef"}


@dataclass(frozen=True)
class _Source:
    """One tensor of a set."""

    tensors: Tensors
    name: str

    @property
    def metadata(self) -> TensorStorageMetadata:
        # Declared as one chunk, however it is stored: `copy` takes what is needed of each stored chunk.
        tensor = self.tensors.meta[self.name]
        chunk = ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)
        return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, [chunk])

    def copy(self, first: torch.Size, target: Tensor) -> None:
        """Fill a tensor with the region that starts at `first` in each dimension. Only overlapping bytes are read."""
        copied = 0
        for offsets, chunk in self.tensors.chunks(self.name):
            into, values = target, chunk
            for dim, (begin, offset) in enumerate(zip(first, offsets, strict=True)):
                low, high = max(begin, offset), min(begin + target.shape[dim], offset + chunk.shape[dim])
                if low >= high:
                    break
                into, values = into.narrow(dim, low - begin, high - low), values.narrow(dim, low - offset, high - low)
            else:
                into.copy_(values.clone())  # mapped memory may not be aligned to the element size
                copied += values.numel()
        if copied != target.numel():
            raise ValueError(f"{self.name}: {copied} of {target.numel()} elements were saved")


class VerlReader(StorageReader):
    """Reads one model of a checkpoint, `.../global_step_N/actor`, and with `moments` its optimizer, whose updates are
    the schedule's position here (verl's schedule counts steps). Raises ConfigError if files are missing or damaged."""

    def __init__(self, directory: Path, *, moments: bool = True) -> None:
        model = read_verl_model(directory)
        if adapters := [name for name in model.meta if "lora_" in name]:
            raise ConfigError(f"{directory} holds a LoRA adapter ({adapters[0]}), from which no run can resume yet")
        tied = HEAD if _is_tied(directory) else None  # saved with the model, but not a parameter
        # The layout of hybridrl's own state, with the optimizer's under the model's names.
        self.sources = {f"model.{name}": _Source(model, name) for name in model.meta if name != tied}
        self.updates: int | None = None
        if moments and holds_verl(directory, OPTIMIZER):
            try:
                state, self.updates = read_moments(directory, model.meta)
            except ConfigError as error:
                raise ConfigError(str(error), fix="trainer.reset_optimizer=true resumes without it") from error
            for moment, tensors in state.items():
                self.sources |= {f"optimizer.state.{name}.{moment}": _Source(tensors, name) for name in tensors.meta}

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        items: dict[str, Any] = {name: source.metadata for name, source in self.sources.items()}
        if self.updates is not None:
            items[UPDATES] = BytesStorageMetadata()
        return Metadata(items, planner_data={})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                content = io.BytesIO()
                torch.save(self.updates, content)
                content.seek(0)
                planner.load_bytes(item, content)
            else:
                target = planner.resolve_tensor(item).detach()
                self.sources[item.storage_index.fqn].copy(item.storage_offsets, target)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # Required by the interface, and without effect here.

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return holds_verl(Path(checkpoint_id))


def _is_tied(directory: Path) -> bool:
    file = directory / HUGGINGFACE / "config.json"
    if not file.is_file():
        return False
    with reading(file):
        return bool(json.loads(file.read_text(encoding="utf-8")).get("tie_word_embeddings"))


@dataclass(frozen=True)
class DataPosition:
    """Prompts used in the current epoch, in verl's own order, and prompts per batch."""

    prompts: int
    batch_size: int


def data_position(step: Path) -> DataPosition:
    """Read the state of torchdata's StatefulDataLoader, whose layout differs with worker processes. Raises ConfigError
    if there is none, or it cannot be read."""
    file = step / DATA
    state = load(file)
    with reading(file):
        if "_snapshot" in state:
            loader = state["_snapshot"]["_main_snapshot"]
            batches = state["_snapshot"]["_snapshot_step"] + state["_steps_since_snapshot"]
        else:
            loader, batches = state, state["_num_yielded"]
        sampler = loader["_sampler_iter_state"] or loader["_index_sampler_state"]
        # Workers prefetch batches, so the sampler may be ahead of the training.
        batch_size = sampler["samples_yielded"] // max(loader["_sampler_iter_yielded"], 1)
        return DataPosition(prompts=batches * batch_size, batch_size=batch_size)


def state_from_verl(
    step: int,
    path: Path,
    *,
    prompts_per_step: int,
    rows: int,
    data: str,
    kl_weight: float,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Return the driver's state after a step of a verl run; log where the number of used prompts comes from."""
    position = None
    try:
        position = data_position(path)
        source = f"data.pt: {position.prompts} of them in the epoch then current"
    except ConfigError as error:
        source = f"counted as {prompts_per_step} per step, as there is no data position: {error}"
    prompts = prompts_used(position, step=step, prompts_per_step=prompts_per_step, rows=rows)
    log(
        f"prompts used by verl's run: {prompts} ({source}). Their order was verl's own, so this is how many there "
        "were and not which: in the current epoch some repeat, and some never come"
    )
    return {
        "prompts": prompts,
        "kl_weight": kl_weight,
        "fault_steps": 0,
        "skipped_in_a_row": {"actor": 0, "critic": 0},
        "sinks": {},
        "data": data,
    }


def prompts_used(position: DataPosition | None, *, step: int, prompts_per_step: int, rows: int) -> int:
    """Return the number of prompts used since the run started. The data loader knows only its position in an epoch; the
    epoch is the one nearest to the number of steps. What verl drops after an epoch's last full batch counts as used."""
    if position is None:
        epochs, steps = divmod(step, max(rows // prompts_per_step, 1))
        return epochs * rows + steps * prompts_per_step
    epoch = max(rows // position.batch_size, 1) * position.batch_size
    return max(round((step * prompts_per_step - position.prompts) / epoch), 0) * rows + position.prompts
