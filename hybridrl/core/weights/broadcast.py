"""Weight sync to rollout servers on devices of their own: the first training rank sends each bucket to all at once, by
NCCL on CUDA and by Gloo on CPU, in a process group that has only it and the engines."""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

from hybridrl.core import device as devices
from hybridrl.core.cluster import Group
from hybridrl.core.weights.buckets import Bucket
from hybridrl.core.weights.sync import Filled, WeightSource, WeightSync, WeightTarget


class BroadcastSync(WeightSync):
    """The process group is formed at the first sync, and again for other servers than those of the last one: after a
    server was replaced."""

    members: Sequence[Any] = ()  # the servers of the process group
    address = ""  # of the process group
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
        if self.address:  # the members that live wait for the one that failed
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
        self._finish_sending()  # of the bucket before
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
