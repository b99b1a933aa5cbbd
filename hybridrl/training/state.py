"""The state of a model in training on disk: parameters, moments, and how many updates there were.

torch.distributed.checkpoint writes tensors cut as they lie on the ranks, and reads them cut in any other way, so the
number of ranks may change in between. Knows nothing of steps, nor which of them is whole.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import CheckpointException

from hybridrl.checkpoint.published import own_tensors
from hybridrl.checkpoint.read import saved_shapes, state_reader
from hybridrl.checkpoint.shards import PlainPlanner
from hybridrl.training.adapted import pairs
from hybridrl.training.fsdp import reshard
from hybridrl.training.model import LanguageModel
from hybridrl.training.optimizer import Optimizers
from hybridrl.training.value_model import ValueModel

State = dict[str, Any]


def state_of(model: LanguageModel | ValueModel, optimizers: Optimizers | None, contents: Collection[str]) -> State:
    """The parts asked for (model, optimizer, extra) with the tensors that training changes, by Hugging Face's names.

    Of a model with an adapter that is the adapter. Learning rates and the like are not among them: they are the
    configuration's.
    """
    reshard(model)
    own = own_tensors(model.model)
    if pairs(model.model):
        own = {name: tensor for name, tensor in own.items() if tensor.requires_grad}
    names = {tensor: name for name, tensor in own.items()}
    state: State = {}
    if "model" in contents:
        state["model"] = {name: tensor.detach() for name, tensor in own.items()}
    if optimizers is not None and "optimizer" in contents:
        held = [item for optimizer in optimizers.optimizers for item in optimizer.state.items()]
        state["optimizer"] = {"state": {names[parameter]: moments for parameter, moments in held}}
    if optimizers is not None and "extra" in contents:
        state["extra"] = {"updates": optimizers.updates, **optimizers.loss_scale.state()}
    return state


def load_state(
    model: LanguageModel | ValueModel,
    optimizers: Optimizers | None,
    contents: Collection[str],
    directory: Path,
    group: ProcessGroup,
) -> None:
    """Read the parts asked for into a model and its optimizers, wherever their tensors lie; collective.

    Raises ConfigError where files cannot be read, ValueError where the directory lacks a part, or holds another model
    or optimizer.
    """
    state = state_of(model, optimizers, contents)
    reader = state_reader(directory, moments="optimizer" in state or "extra" in state)
    saved = saved_shapes(reader, directory)
    for part, value in state.items():
        if part not in saved:
            raise ValueError(f"{directory}: no {part} was saved there, see checkpoint.save_contents")
        shapes = {".".join(path): tensor.shape for path, tensor in tensors(value)}
        _refuse_other(part, saved[part], shapes, directory)
    if "extra" in state:  # a loss scale only where one was in use
        there = reader.read_metadata().state_dict_metadata
        state["extra"] = {name: value for name, value in state["extra"].items() if f"extra.{name}" in there}
    with told(directory):
        dcp.load(state, storage_reader=reader, planner=PlainPlanner(), process_group=group)
    if optimizers is not None and "extra" in state:
        optimizers.go_on_after(state["extra"]["updates"])
        optimizers.loss_scale.load(state["extra"])


def _refuse_other(
    part: str, saved: Mapping[str, torch.Size], present: Mapping[str, torch.Size], directory: Path
) -> None:
    """Refuse saved tensors that are not those present, with the first that differs."""
    way_out = "; trainer.reset_optimizer=true starts without moments and schedule" if part == "optimizer" else ""
    for name in sorted(saved.keys() | present.keys()):
        if name not in saved:
            wrong = f"has no {name}"
        elif name not in present:
            wrong = f"has {name}, which is not in this run's"
        elif saved[name] != present[name]:
            wrong = f"has {name} of the shape {list(saved[name])}, this run's is {list(present[name])}"
        else:
            continue
        raise ValueError(f"{directory}: the {part} saved there {wrong}{way_out}")


@contextmanager
def told(directory: Path) -> Iterator[None]:
    """A failure of torch.distributed.checkpoint as a RuntimeError: its own is no Exception, and ends the process."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise RuntimeError(f"{directory}: rank {rank}: {type(cause).__name__}: {cause}") from cause


def tensors(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """All tensors of a state, with the keys that lead to each."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(item, (*path, key))
    elif isinstance(value, Tensor):
        yield path, value
