"""One rank's side of weight sync: weights are gathered bucket by bucket into memory that a rollout engine on the same
device opens by handle, or that is sent to engines on others."""

from functools import partial

import torch

from hybridrl.checkpoint.export import parts
from hybridrl.core import device as devices
from hybridrl.core.training.fsdp import full_tensor, full_tensors, reshard
from hybridrl.core.training.lora import merged
from hybridrl.core.training.model import LanguageModel, adapter_parameters, pairs, without_pairs
from hybridrl.core.weights.buckets import Bucket, Handle, SharedBuffer, SyncPlan, buffer_bytes, digest, plan_buckets


class Sender:
    """Sends a sharded model in one type: a model with an adapter as base and adapter, or with `merge` merged. Every
    rank creates one and makes the same calls; `plan` holds what is sent, with two buckets of `limit` bytes together."""

    def __init__(self, model: LanguageModel, device: torch.device, dtype: torch.dtype, limit: int, merge: bool) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        adapted = pairs(model.model)
        self.merged = {name: partial(merged, layer) for name, layer in adapted.items()} if merge else {}
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
        """Return a bucket that was filled."""
        assert self.buffer is not None
        return bucket.view(self.buffer.tensor)

    def release(self, *, reader_died: bool = False) -> None:
        """Free device memory; host memory is kept, as touching new pages costs more than it saves."""
        if self.device.type == "cuda":
            self._free(reader_died=reader_died)

    def _free(self, *, reader_died: bool = False) -> None:
        if self.buffer is not None:
            self.buffer.close(reader_died=reader_died)
            self.buffer = None
            devices.release_cached_memory(self.device.type)
