"""Lets torch.distributed.checkpoint read verl's files as if it had written them: on any number of ranks, each of which
reads what falls to it, without another copy on the disk."""

import io
import json
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
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.futures import Future

from hybridrl.checkpoint.tensors import Tensors, reading
from hybridrl.checkpoint.verl.model import OPTIMIZER, holds_verl, read_verl_model
from hybridrl.checkpoint.verl.optimizer import read_moments
from hybridrl.config import ConfigError
from hybridrl.config.model_directory import HUGGINGFACE

# As a state is laid out that we save: the optimizer's under the model's names, and how many updates there were.
MODEL_NAME, MOMENT_NAME, UPDATES = "model.{name}", "optimizer.state.{name}.{moment}", "extra.updates"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class _Place:
    """Where a tensor is found."""

    tensors: Tensors
    name: str

    @property
    def metadata(self) -> TensorStorageMetadata:
        # One chunk, whatever the parts: `_Place.copy` takes from each of them what is wanted.
        tensor = self.tensors.meta[self.name]
        chunk = ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)
        return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, [chunk])

    def copy(self, first: torch.Size, target: Tensor) -> None:
        """Fill a tensor with the region that begins at `first` in each dimension. Files are mapped: of a part that was
        cut as it lies there, nothing else is read."""
        copied = 0
        for offsets, part in self.tensors.parts(self.name):
            into, taken = target, part
            for dim, (begin, offset) in enumerate(zip(first, offsets, strict=True)):
                low, high = max(begin, offset), min(begin + target.shape[dim], offset + part.shape[dim])
                if low >= high:
                    break
                into, taken = into.narrow(dim, low - begin, high - low), taken.narrow(dim, low - offset, high - low)
            else:
                into.copy_(taken.clone())  # mapped memory may lie at an address that is no multiple of its width
                copied += taken.numel()
        if copied != target.numel():
            raise ValueError(f"{self.name}: of {target.numel()} elements {copied} were saved")


class VerlReader(StorageReader):
    """One model of a step, `.../global_step_N/actor`. Raises ConfigError where files are missing or cannot be read.

    The optimizer is read only if asked for (`moments`); how many updates it had is the position of the schedule, which
    here counts them, as verl's own counts training steps.
    """

    def __init__(self, directory: Path, *, moments: bool = True) -> None:
        model = read_verl_model(directory)
        if adapters := [name for name in model.meta if "lora_" in name]:
            raise ConfigError(f"{directory} holds a LoRA adapter ({adapters[0]}), from which no run can go on yet")
        tied = HEAD if _is_tied(directory) else None  # saved with the model, but no parameter of its own
        self.places = {MODEL_NAME.format(name=name): _Place(model, name) for name in model.meta if name != tied}
        self.updates: int | None = None
        if moments and holds_verl(directory, OPTIMIZER):
            try:
                found, self.updates = read_moments(directory, model.meta)
            except ConfigError as error:
                raise ConfigError(f"{error}; trainer.reset_optimizer=true goes on without it") from error
            for moment, tensors in found.items():
                for name in tensors.meta:
                    self.places[MOMENT_NAME.format(name=name, moment=moment)] = _Place(tensors, name)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        items: dict[str, Any] = {name: place.metadata for name, place in self.places.items()}
        if self.updates is not None:
            items[UPDATES] = BytesStorageMetadata()
        return Metadata(items, planner_data={})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._updates())
            else:
                self._read(item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, planner: LoadPlanner) -> None:
        place, target = self.places[item.storage_index.fqn], planner.resolve_tensor(item).detach()
        place.copy(item.storage_offsets, target)
        planner.commit_tensor(item, target)

    def _updates(self) -> io.BytesIO:
        content = io.BytesIO()
        torch.save(self.updates, content)
        content.seek(0)
        return content

    # What torch's readers need besides, and this one does not.

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
