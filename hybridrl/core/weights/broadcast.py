"""Weight sync to rollout servers on devices of their own: the first training rank sends each bucket to all at once, by
NCCL on CUDA and by Gloo on CPU, in a process group that has only it and the engines."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from hybridrl.core import device as devices
from hybridrl.core.weights.buckets import Bucket
from hybridrl.core.weights.sync import BucketSync, Filled, Workers

FIRST = [0]  # the rank that sends


class BroadcastSource(Protocol):
    """The training rank that sends, as it is called here."""

    def listen(self) -> str: ...
    def join_engines(self, address: str, size: int, seconds: float) -> None: ...
    def send_bucket(self, bucket: Bucket) -> None: ...


class BroadcastTarget(Protocol):
    """A rollout server, as it is called here: see rollout.engine.RolloutEngine."""

    async def join_trainer(self, address: str, first_rank: int, size: int, seconds: float) -> None: ...


class BroadcastSync(BucketSync):
    """The process group is formed at the first sync, and again for other servers than those of the last one: after a
    server was replaced."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.members: list[Any] = []  # the servers of the process group
        self.sender: Workers = self.trainers.only(FIRST)
        self.sending: list[Any] = []  # calls
        self.address = ""  # of the process group

    def send(self, buckets: list[Bucket], indices: Sequence[int], *, adapter: bool) -> None:
        try:
            self._form_group(indices)
            super().send(buckets, indices, adapter=adapter)
            self._finish_sending()
        except Exception:
            self.members = []
            if self.address:  # the members that live wait for the one that failed
                devices.cancel_broadcasts(self.address)
            raise

    def _form_group(self, indices: Sequence[int]) -> None:
        members, servers = [self.servers.actors[index] for index in indices], self.servers.only(indices)
        if members == self.members:
            return
        self.members, self.address, size = [], "", 1 + len(members) * self.tp_size
        (address,) = self.sender.broadcast(BroadcastSource.listen, timeout=self.timeout)
        self.address = address
        parts = [(address, 1 + place * self.tp_size, size, self.timeout) for place in range(len(members))]
        joining = servers.start_each(BroadcastTarget.join_trainer, parts)
        ours = self.sender.start_each(BroadcastSource.join_engines, [(address, size, self.timeout)])
        servers.finish(joining, BroadcastTarget.join_trainer, timeout=self.timeout)
        self.sender.finish(ours, BroadcastSource.join_engines, timeout=self.timeout)
        self.members = members

    def _read_by(self, index: int, filled: Sequence[Filled]) -> Sequence[Filled]:
        return [filled[0]] * self.tp_size

    def _start_load(self, servers: Workers, parts: Sequence[tuple]) -> list[Any]:
        self._finish_sending()  # of the bucket before
        loading, bucket = super()._start_load(servers, parts), parts[0][0]
        self.sending = self.sender.start_each(BroadcastSource.send_bucket, [(bucket,)])
        return loading

    def _finish_sending(self) -> None:
        sending, self.sending = self.sending, []
        self.sender.finish(sending, BroadcastSource.send_bucket, timeout=self.timeout)

    def abort(self, dead: Sequence[int]) -> None:
        super().abort(dead)
        with suppress(RuntimeError):  # it failed with the server that was lost
            self._finish_sending()
