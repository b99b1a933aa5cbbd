"""All that a run can go on from in a checkpoint of verl's FSDP workers."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hybridrl.checkpoint.pickles import load
from hybridrl.checkpoint.tensors import Tensors, reading
from hybridrl.checkpoint.verl.model import RankFiles, read_verl_model
from hybridrl.checkpoint.verl.optimizer import read_moments
from hybridrl.config import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class DataPosition:
    """Prompts that were drawn in the present epoch, whose order is verl's own, and how many made a batch."""

    prompts: int
    batch_size: int


@dataclass(frozen=True)
class VerlCheckpoint:
    """None, or no moments, where something was not saved or cannot be read; `notes` says of each why."""

    model: Tensors
    moments: dict[str, Tensors]  # the optimizer's names (exp_avg, exp_avg_sq) -> by the model's names
    updates: int | None  # of the optimizer
    schedule_steps: int | None  # of the learning rate's schedule, which verl takes once a training step
    step: int | None
    data: DataPosition | None
    notes: tuple[str, ...]


def read_verl(directory: Path) -> VerlCheckpoint:
    """The checkpoint of one model, `.../global_step_N/actor`. Raises ConfigError where the model cannot be read."""
    model = read_verl_model(directory)
    step = re.fullmatch(r"global_step_(\d+)", directory.absolute().parent.name)
    notes: list[str] = []
    moments, updates = _try(lambda: read_moments(directory, model.meta), notes) or ({}, None)
    return VerlCheckpoint(
        model=model,
        moments=moments,
        updates=updates,
        schedule_steps=_try(lambda: _schedule_steps(directory), notes),
        step=int(step[1]) if step else None,
        data=_try(lambda: _data_position(directory.parent / "data.pt"), notes),
        notes=tuple(notes),
    )


def _try(read: Callable[[], T], notes: list[str]) -> T | None:
    """Say why not, where something cannot be read."""
    try:
        return read()
    except ConfigError as error:
        notes.append(str(error))
        return None


def _schedule_steps(directory: Path) -> int:
    file = RankFiles(directory, "extra_state").paths[0]
    with reading(file):
        return int(load(file)["lr_scheduler"]["last_epoch"])


def _data_position(file: Path) -> DataPosition:
    """From the state of torchdata's StatefulDataLoader, which is another with worker processes than without."""
    state = load(file)
    with reading(file):
        if "_snapshot" in state:
            sampled = state["_snapshot"]["_main_snapshot"]
            batches = state["_snapshot"]["_snapshot_step"] + state["_steps_since_snapshot"]
        else:
            sampled, batches = state, state["_num_yielded"]
        sampler = sampled["_sampler_iter_state"] or sampled["_index_sampler_state"]
        # Workers draw batches ahead, so the sampler may have gone further than the training.
        batch_size = sampler["samples_yielded"] // sampled["_sampler_iter_yielded"]
        return DataPosition(prompts=batches * batch_size, batch_size=batch_size)
