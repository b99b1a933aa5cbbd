"""Weight sync: weights are gathered and sent bucket by bucket, digests are compared, and a probe proves that engines
compute with the new weights. Also the protocols of the training ranks and rollout engines that it calls.

`ColocatedSync` is for rollout servers on the devices of the training ranks: they open the ranks' memory by handle and
read it in place. `BroadcastSync` is for servers on other devices: the first training rank sends each bucket to all at
once, by NCCL on CUDA and by Gloo on CPU, in a process group of this rank and the engines only.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Protocol

import torch

from hybridrl.config.schema import RolloutConfig
from hybridrl.core import device as devices
from hybridrl.core.batch import Batch, token_rows
from hybridrl.core.carried import Encoded, Fields, declared
from hybridrl.core.cluster import Group
from hybridrl.core.pictures import NO_PIXELS, Pixels
from hybridrl.core.rounding import beyond_rounding, coarser
from hybridrl.core.weights.buckets import Bucket, Handle, SyncPlan

IMPOSSIBLE = -1e4  # the log-prob of a placeholder of a picture is below, and is minus infinity in an engine
# A bucket in a rank's memory: the handle, if an engine on its device will open it, and the digest of the bytes.
Filled = tuple[Handle | None, int]


class StaleWeights(RuntimeError):
    """An engine does not hold the trainer's weights, so nothing may be sampled from it."""

    code = "stale-weights"


class WeightSource(Protocol):
    """The methods of a training rank that a weight sync calls; the calls are collective."""

    def plan_weights(self, dtype: str, limit: int) -> SyncPlan: ...
    def fill_bucket(self, bucket: Bucket, shared: bool) -> Filled: ...
    def release_buckets(self, reader_died: bool = False) -> None: ...
    def forward(
        self, name: str, batch: Batch, micro_batches: list[list[int]], spec: None, rounding: str
    ) -> tuple[list[Any], int]: ...
    def listen(self) -> str: ...
    def join_engines(self, address: str, size: int, seconds: float) -> None: ...
    def send_bucket(self, bucket: Bucket) -> None: ...


class WeightTarget(Protocol):
    """The methods of a rollout engine that a weight sync calls; its server forwards the calls."""

    async def join_trainer(self, address: str, first_rank: int, size: int, seconds: float) -> None:
        """Form a group with the training rank that listens at `address` and will send buckets; `first_rank` is the rank
        of this engine's first device."""

    async def begin_weights(self) -> None:
        """Prepare for the buckets of the whole model."""

    async def load_bucket(
        self, bucket: Bucket, handles: list[Handle | None], digests: list[int], adapter: bool
    ) -> None:
        """Load one bucket of the model, or of its adapter, from the trainers' memory, or receive it from the group if
        there is no handle. There is one handle and one digest per device of this engine. RuntimeError if the bytes
        differ from those that were sent."""

    async def finish_weights(self) -> None:
        """Finish loading the whole model, also if buckets are missing."""

    async def finish_sync(self, sync_id: int, version: int) -> None:
        """Use the loaded weights from now on, with an empty prefix cache. Tokens are then sampled with `version`."""

    async def held_sync(self) -> int:
        """Return the id of the weight sync whose weights the engine uses."""

    async def score(
        self, token_ids: list[int], carried: Fields | None = None, pixels: Mapping[int, Pixels] = NO_PIXELS
    ) -> list[float]:
        """Return the log-probs of the tokens of a sequence after its first one, without sampling. `carried` names the
        pictures in it; `pixels` has theirs, by digest."""


class WeightSync(ABC):
    """Brings the trainers' weights to the rollout engines and proves that they have arrived; created once both are
    built. `probe` is a fixed sequence of token ids whose log-probs prove each sync; a run with pictures has one in it,
    as an engine may keep features of an earlier tower. `train_dtype` is the type that the trainers compute in."""

    shared = False  # whether engines open the ranks' memory

    def __init__(
        self,
        trainers: Group,
        servers: Group,
        rollout: RolloutConfig,
        *,
        probe: Encoded,
        train_dtype: str,
        timeout: float,
        pixels: Mapping[int, Pixels] = NO_PIXELS,
    ) -> None:
        self.trainers, self.servers, self.timeout = trainers, servers, timeout
        self.tp_size = rollout.tensor_model_parallel_size
        self.rounded = coarser(train_dtype, rollout.dtype or train_dtype)  # its rounding explains differences
        self.probe, self.pixels = probe, pixels
        self.rounding = torch.empty(0)  # change of the log-probs of the probe if the last bits of `rounded` flip
        self.sync_id = 0  # counts syncs: a version that is published again gets a new one
        self.version = -1
        self.servers_with_base: set[Any] = set()  # servers that hold the base model of the adapter
        self.gaps: list[float] = []
        self.sent = 0  # bytes published since `take_metrics`
        self.digests: dict[bool, list[int]] = {}  # digests of the buckets sent last; True: of an adapter
        limit = rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
        self.plan = trainers.broadcast(WeightSource.plan_weights, rollout.dtype, limit, timeout=timeout)[0]

    @property
    def weights(self) -> str:
        """Digests of the weights of the last `publish`: equal for equal weights."""
        return str(sorted(self.digests.items()))

    def publish(self, version: int) -> None:
        """Send the present weights to all servers; from then on they sample tokens with this version."""
        self.expected = self._probed("")
        if not len(self.rounding):
            self.rounding = self._probed(self.rounded) - self.expected
        self.sync_id, self.version = self.sync_id + 1, version
        self.send_all(range(len(self.servers)))

    def _probed(self, rounding: str) -> torch.Tensor:
        carried = {name: torch.from_numpy(value) for name, value in self.probe.carried.items()}
        counts = {declared(name).lengths: torch.tensor([len(value)]) for name, value in carried.items()}
        row = replace(token_rows([self.probe.ids]), carried=counts | carried)
        arguments = "actor", row, [[0]], None, rounding
        columns, _ = self.trainers.broadcast(WeightSource.forward, *arguments, timeout=self.timeout)[0]
        return torch.tensor(columns[0])

    def restore(self, index: int) -> None:
        """Send the weights of the last `publish` to a server that was rebuilt since."""
        sent = self.sent
        self.send_all([index])
        self.sent = sent

    def send_all(self, indices: Sequence[int]) -> None:
        """Send the model to these servers, and the adapter; servers that have the base already get only the adapter."""
        adapter, actors = self.plan.adapter, self.servers.actors
        if lacking := [index for index in indices if not (adapter and actors[index] in self.servers_with_base)]:
            without_base = self.servers.only(lacking)
            without_base.broadcast(WeightTarget.begin_weights, timeout=self.timeout)
            self.send(self.plan.model, lacking, adapter=False)
            without_base.broadcast(WeightTarget.finish_weights, timeout=self.timeout)
            self.servers_with_base.update(actors[index] for index in lacking)
        self.send(adapter, indices, adapter=True)
        servers = self.servers.only(indices)
        servers.broadcast(WeightTarget.finish_sync, self.sync_id, self.version, timeout=self.timeout)
        self.trainers.broadcast(WeightSource.release_buckets, timeout=self.timeout)

    def send(self, buckets: list[Bucket], indices: Sequence[int], *, adapter: bool) -> None:
        """Send buckets to these servers; all ranks take part, as gathering is collective. While the servers read one
        bucket, the ranks fill the next one in the other half of their memory."""
        servers, reading, read = self.servers.only(indices), [], ""
        self.digests[adapter] = []
        for number, bucket in enumerate(buckets, start=1):
            names = [tensor.name for tensor in bucket.tensors]
            about = f" (bucket {number} of {len(buckets)}: {' ... '.join([*names[:1], *names[-1:]])})"
            filling = self.trainers.start_each(WeightSource.fill_bucket, [(bucket, self.shared)] * len(self.trainers))
            servers.finish(reading, WeightTarget.load_bucket, timeout=self.timeout, about=read)
            filled = self.trainers.finish(filling, WeightSource.fill_bucket, timeout=self.timeout, about=about)
            self.sent += bucket.bytes
            self.digests[adapter].append(filled[0][1])  # the same on every rank
            parts = [
                (bucket, *map(list, zip(*self._read_by(index, filled), strict=True)), adapter) for index in indices
            ]
            reading, read = self._start_load(servers, parts), about
        servers.finish(reading, WeightTarget.load_bucket, timeout=self.timeout, about=read)

    @abstractmethod
    def _read_by(self, index: int, filled: Sequence[Filled]) -> Sequence[Filled]:
        """Return the handle and digest of a filled bucket for each device of a server."""

    def _start_load(self, servers: Group, parts: Sequence[tuple]) -> list[Any]:
        return servers.start_each(WeightTarget.load_bucket, parts)

    def abort(self, dead: Sequence[int]) -> None:
        """Clean up after the failure of a `publish` by the death of these servers, so that the others can sleep. The
        dead servers have been killed already."""
        self.servers.failures(WeightTarget.finish_weights, timeout=self.timeout)  # the others wait for more buckets
        read_by_dead = [(self.shared and rank // self.tp_size in dead,) for rank in range(len(self.trainers))]
        self.trainers.scatter(WeightSource.release_buckets, read_by_dead, timeout=self.timeout)

    def verify(self, index: int | None = None) -> None:
        """Raise StaleWeights unless all servers, or this one, compute with the weights of the last `publish`. Checks
        log-probs of the probe, and the sync's id, as a small update changes log-probs by less than rounding."""
        indices = list(range(len(self.servers))) if index is None else [index]
        servers = self.servers.only(indices)
        sync_ids = servers.broadcast(WeightTarget.held_sync, timeout=self.timeout)
        for server, sync_id in zip(indices, sync_ids, strict=True):
            if sync_id != self.sync_id:
                raise StaleWeights(
                    f"rollout server {server} computes with the weights of weight sync {sync_id}, but the trainer's "
                    f"are those of {self.sync_id}, so no responses are sampled"
                )
        pictures = (dict(self.probe.carried), self.pixels) if self.probe.carried else ()
        scores = servers.broadcast(WeightTarget.score, self.probe.ids, *pictures, timeout=self.timeout)
        possible = self.expected > IMPOSSIBLE
        expected, rounding = self.expected[possible], self.rounding[possible]
        for server, log_probs in zip(indices, scores, strict=True):
            computed = torch.tensor(log_probs)[possible]
            self.gaps.append(float((computed - expected).abs().max()))
            if difference := beyond_rounding(computed, expected, self.rounded, expected + rounding):
                raise StaleWeights(
                    f"after the weight sync, rollout server {server} differs from the trainer in the log-probs of a "
                    f"fixed sequence {difference}. Every bucket that was sent has arrived as it was, so the engine "
                    "computes something else from the weights; no responses are sampled"
                )

    def take_metrics(self) -> dict[str, float]:
        """Return the largest difference of the probe's log-probs since the last call, and the GB published."""
        gaps, self.gaps, sent, self.sent = self.gaps, [], self.sent, 0
        published = {"perf/weights_gb": sent / 1e9} if sent else {}
        return published | ({"training/probe_log_prob_diff": max(gaps)} if gaps else {})


class ColocatedSync(WeightSync):
    """Rank r shares its device with server r // tensor_model_parallel_size, which opens the rank's memory."""

    shared = True

    def _read_by(self, index: int, filled: Sequence[Filled]) -> Sequence[Filled]:
        return filled[index * self.tp_size : (index + 1) * self.tp_size]


class BroadcastSync(WeightSync):
    """Sends buckets in a process group. The group is formed at the first sync, and again when the servers are not those
    of the last sync, such as after a server was replaced."""

    members: Sequence[Any] = ()  # the servers of the process group
    address = ""  # where the sender listened for the process group
    sending: Sequence[Any] = ()  # calls in flight

    @property
    def sender(self) -> Group:
        return self.trainers.only([0])

    def send(self, buckets: list[Bucket], indices: Sequence[int], *, adapter: bool) -> None:
        with ExitStack() as if_it_fails:
            if_it_fails.callback(self._cancel)
            self._form_group(indices)
            super().send(buckets, indices, adapter=adapter)
            self._finish_sending()
            if_it_fails.pop_all()

    def _cancel(self) -> None:
        self.members = ()
        if self.address:  # the living members wait for the failed one
            devices.cancel_broadcasts(self.address)

    def _form_group(self, indices: Sequence[int]) -> None:
        members, servers = [self.servers.actors[index] for index in indices], self.servers.only(indices)
        if members == self.members:
            return
        self.members, self.address, size = (), "", 1 + len(members) * self.tp_size
        (address,) = self.sender.broadcast(WeightSource.listen, timeout=self.timeout)
        self.address = address
        parts = [(address, 1 + place * self.tp_size, size, self.timeout) for place in range(len(members))]
        joining = servers.start_each(WeightTarget.join_trainer, parts)
        ours = self.sender.start_each(WeightSource.join_engines, [(address, size, self.timeout)])
        servers.finish(joining, WeightTarget.join_trainer, timeout=self.timeout)
        self.sender.finish(ours, WeightSource.join_engines, timeout=self.timeout)
        self.members = members

    def _read_by(self, index: int, filled: Sequence[Filled]) -> Sequence[Filled]:
        return [filled[0]] * self.tp_size

    def _start_load(self, servers: Group, parts: Sequence[tuple]) -> list[Any]:
        self._finish_sending()  # the previous bucket must have been sent
        loading, bucket = super()._start_load(servers, parts), parts[0][0]
        self.sending = self.sender.start_each(WeightSource.send_bucket, [(bucket,)])
        return loading

    def _finish_sending(self) -> None:
        sending, self.sending = self.sending, ()
        self.sender.finish(sending, WeightSource.send_bucket, timeout=self.timeout)

    def abort(self, dead: Sequence[int]) -> None:
        super().abort(dead)
        with suppress(RuntimeError):  # it failed with the server that died
            self._finish_sending()
