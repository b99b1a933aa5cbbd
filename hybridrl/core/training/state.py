"""Output of a training rank: the state of a model for the disk (parameters, moments, and the number of updates; read,
and written in the background while training continues), and its weights for the rollout engines.

torch.distributed.checkpoint writes tensors as they are sharded over the ranks and can read them with any other
sharding, so the number of ranks may change in between. Knows neither steps nor which checkpoint is complete.
"""

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

from hybridrl.checkpoint.export import own_tensors, parts
from hybridrl.checkpoint.read import PlainPlanner, saved_shapes, state_reader
from hybridrl.core import device as devices
from hybridrl.core.training.fsdp import full_tensor, full_tensors, host_copies, local, reshard
from hybridrl.core.training.lora import merged_weight
from hybridrl.core.training.model import LanguageModel, TokenModel, adapter_parameters, pairs, without_pairs
from hybridrl.core.training.optimizer import Optimizers
from hybridrl.core.weights.buckets import Bucket, Handle, SharedBuffer, SyncPlan, buffer_bytes, digest, plan_buckets

State = dict[str, Any]


def state_of(model: TokenModel, optimizers: Optimizers | None, contents: Collection[str]) -> State:
    """Return the requested parts (model, optimizer, extra) with all trained tensors, by Hugging Face's names; for a
    model with an adapter only the adapter's. Learning rates and other settings come from the configuration."""
    reshard(model)
    tensors = own_tensors(model.model)
    if pairs(model.model):
        tensors = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    names = {tensor: name for name, tensor in tensors.items()}
    state: State = {}
    if "model" in contents:
        state["model"] = {name: tensor.detach() for name, tensor in tensors.items()}
    if optimizers is not None and "optimizer" in contents:
        moments = [item for optimizer in optimizers.optimizers for item in optimizer.state.items()]
        state["optimizer"] = {"state": {names[parameter]: of_parameter for parameter, of_parameter in moments}}
    if optimizers is not None and "extra" in contents:
        state["extra"] = {"updates": optimizers.updates, **optimizers.loss_scale.state()}
    return state


def load_state(
    model: TokenModel, optimizers: Optimizers | None, contents: Collection[str], directory: Path, group: ProcessGroup
) -> None:
    """Read the requested parts into the tensors of a model and its optimizers, on any device; collective.
    Raises ConfigError if files cannot be read, ValueError if the directory lacks a part, or holds another model or
    optimizer."""
    state = state_of(model, optimizers, contents)
    reader = state_reader(directory, moments="optimizer" in state or "extra" in state)
    saved = saved_shapes(reader, directory)
    for part, value in state.items():
        if part not in saved:
            raise ValueError(f"{directory}: no {part} was saved there, see checkpoint.save_contents")
        present = {name: item.shape for name, item in flatten_state_dict(value)[0].items() if isinstance(item, Tensor)}
        _check_shapes(part, saved[part], present, directory)
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
    """Raise a CheckpointException as RuntimeError: it is not an Exception, and would end the process."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise RuntimeError(f"{directory}: rank {rank}: {type(cause).__name__}: {cause}") from cause


class StateWriter:
    """Writes states in the background, one after another, from copies in host memory; on CUDA later saves reuse them.
    All ranks create one together and call it in the same order. Its collectives use a separate group, since training
    runs collectives at the same time."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.group = devices.own_group(dist.new_group(backend="gloo", timeout=devices.collective_timeout()))
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="state-writer")
        self.copies: dict[str, dict[str, Tensor]] = {}  # by model and the tensor's name
        self.writing: list[Future[None]] = []

    def start(self, states: Mapping[Path, State]) -> int:
        """Copy states, which may change afterwards, and write each to its directory. Returns the bytes copied. First
        waits for the previous save, which still uses the copies. Raises RuntimeError on every rank, and writes nothing,
        if one of them could not copy: the other ranks' collectives would wait for it in vain."""
        wait(self.writing)
        every_rank = torch.zeros(())
        try:
            devices.synchronize(self.device)  # offloaded moments may still be on their way to the host
            if self.device == "cpu":  # the copies take the place of memory that an update has freed
                devices.release_cached_memory(self.device)
            copied = {}
            for directory, state in states.items():
                # torch's own stager finds reused memory by the original's address, which changes in every step if
                # parameters or moments are offloaded.
                flat, nesting = flatten_state_dict(state)
                present = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
                if self.copies.get(directory.name, {}).keys() != present.keys():
                    # Page-locked in one allocation; elsewhere torch would copy tensors of one allocation to write them.
                    groups = [[*present.values()]] if self.device == "cuda" else [[leaf] for leaf in present.values()]
                    copies = [copy for group in groups for copy in host_copies(group, self.device)]
                    self.copies[directory.name] = dict(zip(present, copies, strict=True))
                for name, tensor in present.items():
                    local(self.copies[directory.name][name]).copy_(local(tensor), non_blocking=True)
                copied[directory] = unflatten_state_dict(flat | self.copies[directory.name], nesting)
            devices.synchronize(self.device)
            every_rank += 1
        finally:
            dist.all_reduce(every_rank, dist.ReduceOp.MIN, self.group)
        if not every_rank:
            raise RuntimeError("another rank could not copy its state to host memory")
        self.writing = [
            self.thread.submit(_checkpoint_errors(path)(dcp.save), state, checkpoint_id=path, process_group=self.group)
            for path, state in copied.items()
        ]
        size = sum(local(copy).nbytes for directory in states for copy in self.copies[directory.name].values())
        if self.device == "cpu":  # each is freed once it is written: only page-locked memory takes long to allocate
            self.copies.clear()
        return size

    def finished(self) -> bool:
        """Return whether everything is on disk. Raises RuntimeError, once, if something could not be written."""
        if not all(future.done() for future in self.writing):
            return False
        done, self.writing = self.writing, []
        for future in done:
            future.result()
        return True


class Sender:
    """One rank's side of weight sync: gathers weights bucket by bucket in memory, for a rollout engine on the same
    device to open by handle, or to be sent to engines on other devices.

    It sends a sharded model in one type: a model with an adapter as base and adapter, or with `merge` merged. All ranks
    create one and make the same calls. `plan` has the buckets; two of them take at most `limit` bytes."""

    def __init__(self, model: LanguageModel, device: torch.device, dtype: torch.dtype, limit: int, merge: bool) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        adapted = pairs(model.model)
        self.merged = {name: partial(merged_weight, layer) for name, layer in adapted.items()} if merge else {}
        with without_pairs(model.model):
            self.parts = parts(model.model, dtype)
        base = [(name, tensor.shape, tensor.dtype) for part in self.parts for name, tensor in part.published.items()]
        apart = adapter_parameters(model.model) if adapted and not merge else {}
        adapter = [(name, value.shape, dtype) for name, value in apart.items()]
        self.plan = SyncPlan(plan_buckets(base, limit), plan_buckets(adapter, limit))
        self.buffer: SharedBuffer | None = None

    @torch.no_grad()
    def fill(self, bucket: Bucket, *, shared: bool) -> tuple[Handle | None, int]:
        """Gather one bucket's weights in the buffer; collective. Returns the buffer's handle, if an engine is to open
        it, and the digest of the bytes."""
        # One buffer for this bucket and those sent with it: for an adapter it is smaller than for the base.
        size = buffer_bytes(self.plan.adapter if bucket in self.plan.adapter else self.plan.model)
        if self.buffer is None or len(self.buffer.tensor) < size:
            self._free()
            reshard(self.model)
            self.buffer = SharedBuffer(size, self.device)
        bucket.clear_gaps(self.buffer.tensor)
        target, tensors = bucket.view(self.buffer.tensor), {tensor.name: tensor for tensor in bucket.tensors}
        for name, value in adapter_parameters(self.model.model).items():
            if name in tensors:
                tensors[name].view(target).copy_(full_tensor(value.detach(), self.dtype))
        here = [part for part in self.parts if not tensors.keys().isdisjoint(part.published)]
        with without_pairs(self.model.model):
            for name, value in full_tensors(self.model.model, here, self.merged):
                tensors[name].view(target).copy_(value)
        devices.synchronize(self.device.type)
        return self.buffer.handle if shared else None, digest(target)

    def bytes_of(self, bucket: Bucket) -> torch.Tensor:
        """Return the bytes of a filled bucket."""
        assert self.buffer is not None
        return bucket.view(self.buffer.tensor)

    def release(self, *, reader_died: bool = False) -> None:
        """Free device memory; host memory is kept, as allocating new pages costs more than it saves."""
        if self.device.type == "cuda":
            self._free(reader_died=reader_died)

    def _free(self, *, reader_died: bool = False) -> None:
        if self.buffer is not None:
            self.buffer.close(reader_died=reader_died)
            self.buffer = None
            devices.release_cached_memory(self.device.type)
