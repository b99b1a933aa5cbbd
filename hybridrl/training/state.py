"""The training state of a model on disk: parameters, moments, and the number of updates; read, and written in the
background while training continues.

torch.distributed.checkpoint writes tensors as they are sharded over the ranks and can read them with any other
sharding, so the number of ranks may change in between. Knows neither steps nor which checkpoint is complete.
"""

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import CheckpointException

from hybridrl import device as devices
from hybridrl.checkpoint.export import own_tensors
from hybridrl.checkpoint.read import PlainPlanner, saved_shapes, state_reader
from hybridrl.training.fsdp import host_copies, local, reshard
from hybridrl.training.model import LanguageModel, ValueModel, pairs
from hybridrl.training.optimizer import Optimizers

State = dict[str, Any]
Keys = tuple[str, ...]  # the keys that lead to a tensor of a state


def state_of(model: LanguageModel | ValueModel, optimizers: Optimizers | None, contents: Collection[str]) -> State:
    """Return the requested parts (model, optimizer, extra) with all trained tensors, by Hugging Face's names; for a
    model with an adapter only the adapter's. Learning rates and the like come from the configuration instead."""
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
    """Read the requested parts into a model and its optimizers, on whatever device their tensors are; collective.

    Raises ConfigError if files cannot be read, ValueError if the directory lacks a part, or holds another model or
    optimizer.
    """
    state = state_of(model, optimizers, contents)
    reader = state_reader(directory, moments="optimizer" in state or "extra" in state)
    saved = saved_shapes(reader, directory)
    for part, value in state.items():
        if part not in saved:
            raise ValueError(f"{directory}: no {part} was saved there, see checkpoint.save_contents")
        _check_shapes(part, saved[part], {".".join(path): tensor.shape for path, tensor in _tensors(value)}, directory)
    if "extra" in state:  # a loss scale is saved only where one was in use
        saved_names = reader.read_metadata().state_dict_metadata
        state["extra"] = {name: value for name, value in state["extra"].items() if f"extra.{name}" in saved_names}
    with _checkpoint_errors(directory):
        dcp.load(state, storage_reader=reader, planner=PlainPlanner(), process_group=group)
    if optimizers is not None and "extra" in state:
        optimizers.resume_after(state["extra"]["updates"])
        optimizers.loss_scale.load(state["extra"])


def _check_shapes(
    part: str, saved: Mapping[str, torch.Size], present: Mapping[str, torch.Size], directory: Path
) -> None:
    """Raise ValueError if the saved tensors are not those present, naming the first that differs."""
    for name in sorted(saved.keys() | present.keys()):
        if name not in saved:
            difference = f"has no {name}"
        elif name not in present:
            difference = f"has {name}, which is not in this run's"
        elif saved[name] != present[name]:
            difference = f"has {name} of the shape {list(saved[name])}, this run's is {list(present[name])}"
        else:
            continue
        hint = "; trainer.reset_optimizer=true starts without moments and schedule" if part == "optimizer" else ""
        raise ValueError(f"{directory}: the {part} saved there {difference}{hint}")


@contextmanager
def _checkpoint_errors(directory: Path) -> Iterator[None]:
    """Raise a CheckpointException as RuntimeError: the former is no Exception, and would end the process."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise RuntimeError(f"{directory}: rank {rank}: {type(cause).__name__}: {cause}") from cause


def _tensors(value: Any, path: Keys = ()) -> Iterator[tuple[Keys, Tensor]]:
    """Yield all tensors of a state, with the keys that lead to each."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, (*path, key))
    elif isinstance(value, Tensor):
        yield path, value


@dataclass(frozen=True)
class SaveCost:
    """The cost of a save for a rank: seconds for which training stops, and bytes of state in host memory."""

    seconds: float
    bytes: int


class StateWriter:
    """Writes states in the background, one after another, from copies in host memory that are reused by later saves.

    All ranks create one together and call it in the same order. Its collectives use a separate group, since those of
    training continue meanwhile.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.group = dist.new_group(backend="gloo")
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="state-writer")
        self.copies: dict[str, dict[Keys, Tensor]] = {}  # by model
        self.writing: list[Future[None]] = []

    def start(self, states: Mapping[Path, State]) -> int:
        """Copy states, which may change afterwards, and write each to its directory. Returns the bytes copied.

        First waits for the previous save, which still uses the copies. Raises RuntimeError on every rank if one of them
        could not copy, and writes nothing: the other ranks' collectives would wait for it in vain.
        """
        wait(self.writing)
        every_rank = torch.zeros(())
        try:
            devices.synchronize(self.device)  # offloaded moments may still be on their way to the host
            copied = {directory: self._copy(state, directory.name) for directory, state in states.items()}
            devices.synchronize(self.device)
            every_rank += 1
        finally:
            dist.all_reduce(every_rank, dist.ReduceOp.MIN, self.group)
        if not every_rank:
            raise RuntimeError("another rank could not copy its state to host memory")
        self.writing = [self.thread.submit(_write, directory, state, self.group) for directory, state in copied.items()]
        return sum(local(tensor).nbytes for _, tensor in _tensors(copied))

    def finished(self) -> bool:
        """Return whether everything is on disk. Raises RuntimeError, once, if something could not be written."""
        if not all(future.done() for future in self.writing):
            return False
        done, self.writing = self.writing, []
        for future in done:
            future.result()
        return True

    def _copy(self, state: State, name: str) -> State:
        """Return the state with its tensors copied to reused host memory. torch's own stager finds that memory by the
        original's address, which changes in every step if parameters or moments are offloaded."""
        present = dict(_tensors(state))
        if self.copies.get(name, {}).keys() != present.keys():
            self.copies[name] = dict(zip(present, host_copies(list(present.values()), self.device), strict=True))
        for path, tensor in present.items():
            local(self.copies[name][path]).copy_(local(tensor), non_blocking=True)
        return _replaced(state, self.copies[name])


def _replaced(value: Any, by: dict[Keys, Tensor], path: Keys = ()) -> Any:
    """Return a state with these tensors in place of its own."""
    if isinstance(value, dict):
        return {key: _replaced(item, by, (*path, key)) for key, item in value.items()}
    return by.get(path, value)


def _write(directory: Path, state: State, group: ProcessGroup) -> None:
    with _checkpoint_errors(directory):
        dcp.save(state, checkpoint_id=directory, process_group=group)
