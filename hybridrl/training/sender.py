"""One rank's side of handing weights to the rollout engine on its device: gathered a bucket at a time, into memory that
the engine opens by handle."""

from functools import partial

import torch

from hybridrl import device as devices
from hybridrl.checkpoint.published import parts
from hybridrl.training.adapted import adapter_parameters, pairs, without_pairs
from hybridrl.training.fsdp import reshard, whole_tensors
from hybridrl.training.lora import merged
from hybridrl.training.model import LanguageModel
from hybridrl.training.shards import whole
from hybridrl.weights.handles import Handle, SharedBuffer, digest
from hybridrl.weights.layout import Bucket, HandOver, buffer_bytes, plan_buckets


class Sender:
    """Sends a sharded model in one type: of one with an adapter both, or with `merge` what they are together.

    All ranks make one and call it alike; `plan` says what there is to send, in buckets of at most `limit` bytes.
    """

    def __init__(self, model: LanguageModel, device: torch.device, dtype: torch.dtype, limit: int, merge: bool) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        adapted = pairs(model.model)
        self.merged = {name: partial(merged, layer) for name, layer in adapted.items()} if merge else {}
        with without_pairs(model.model):
            self.parts = parts(model.model, dtype)
        base = [(name, tensor.shape, tensor.dtype) for part in self.parts for name, tensor in part.published.items()]
        apart = adapter_parameters(model.model) if adapted and not merge else {}
        adapter = [(name, value.shape, dtype) for name, value in apart.items()]
        self.plan = HandOver(plan_buckets(base, limit), plan_buckets(adapter, limit))
        self.buffer: SharedBuffer | None = None

    @torch.no_grad()
    def fill(self, bucket: Bucket) -> tuple[Handle, int]:
        """Gather one bucket's weights; collective. Returns handle and digest."""
        self._make_room(bucket)
        room, places = bucket.room(self.buffer.tensor), {place.name: place for place in bucket.tensors}
        for name, value in adapter_parameters(self.model.model).items():
            if name in places:
                places[name].view(room).copy_(whole(value.detach(), self.dtype))
        here = [part for part in self.parts if not places.keys().isdisjoint(part.published)]
        with without_pairs(self.model.model):
            for name, value in whole_tensors(self.model.model, here, self.merged):
                places[name].view(room).copy_(value)
        devices.synchronize(self.device.type)
        return self.buffer.handle, digest(room)

    def _make_room(self, bucket: Bucket) -> None:
        """Have a buffer for this bucket and those that come with it. An adapter alone needs none of the base's size."""
        buckets = self.plan.adapter if bucket in self.plan.adapter else self.plan.model
        size = buffer_bytes(buckets)
        if self.buffer is None or len(self.buffer.tensor) < size:
            self._free()
            reshard(self.model)
            self.buffer = SharedBuffer(size, self.device)

    def release(self, *, reader_died: bool = False) -> None:
        """Free the device's memory; host memory is kept, as touching new pages costs more than it saves."""
        if self.device.type == "cuda":
            self._free(reader_died=reader_died)

    def _free(self, *, reader_died: bool = False) -> None:
        if self.buffer is not None:
            self.buffer.close(reader_died=reader_died)
            self.buffer = None
            devices.release_cached_memory(self.device.type)
