"""Writes states of models to disk while training goes on; the copy into host memory is all that training waits for."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridrl import device as devices
from hybridrl.training.shards import host_places, local
from hybridrl.training.state import State, tensors, told


@dataclass(frozen=True)
class Copied:
    """What a save cost a rank: seconds for which training stood still, and bytes of state in host memory."""

    seconds: float
    bytes: int


class StateWriter:
    """Writes states in the background, one after another, from copies in host memory that is kept for the next ones.

    All ranks make one together and use it alike. Its collectives run in a group of their own, since those of training
    go on meanwhile.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.group = dist.new_group(backend="gloo")
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="state-writer")
        self.copies: dict[str, dict[tuple[str, ...], Tensor]] = {}  # by model, and the keys that lead to each tensor
        self.writing: list[Future[None]] = []

    def start(self, states: Mapping[Path, State]) -> int:
        """Copy states, which may change from then on, and have each written to its directory. Returns bytes copied.

        Waits till the last ones are written, since their copies are in use till then. Raises RuntimeError on every rank
        where one could not copy, and writes nothing: alone, the others would wait in vain.
        """
        wait(self.writing)
        every_rank = torch.zeros(())
        try:
            devices.synchronize(self.device)  # offloaded moments may be on their way to the host still
            copied = {directory: self._copy(state, directory.name) for directory, state in states.items()}
            devices.synchronize(self.device)
            every_rank += 1
        finally:
            dist.all_reduce(every_rank, dist.ReduceOp.MIN, self.group)
        if not every_rank:
            raise RuntimeError("another rank could not copy its state to host memory")
        self.writing = [self.thread.submit(_write, directory, state, self.group) for directory, state in copied.items()]
        return sum(local(tensor).nbytes for _, tensor in tensors(copied))

    def finished(self) -> bool:
        """Whether all is on the disk. Raises RuntimeError, once, where it could not be written."""
        if not all(future.done() for future in self.writing):
            return False
        done, self.writing = self.writing, []
        for future in done:
            future.result()
        return True

    def _copy(self, state: State, name: str) -> State:
        """The same with tensors in host memory, which is kept for the next time. torch's own stager finds it by the
        original's address, which is another after every step where parameters or moments are offloaded."""
        present = dict(tensors(state))
        if self.copies.get(name, {}).keys() != present.keys():
            self.copies[name] = dict(zip(present, host_places(list(present.values()), self.device), strict=True))
        for path, tensor in present.items():
            local(self.copies[name][path]).copy_(local(tensor), non_blocking=True)
        return _replaced(state, self.copies[name])


def _replaced(value: Any, by: dict[tuple[str, ...], Tensor], path: tuple[str, ...] = ()) -> Any:
    """A state with other tensors in the places of its own."""
    if isinstance(value, dict):
        return {key: _replaced(item, by, (*path, key)) for key, item in value.items()}
    return by.get(path, value)


def _write(directory: Path, state: State, group: ProcessGroup) -> None:
    with told(directory):
        dcp.save(state, checkpoint_id=directory, process_group=group)
