"""Weight sync to engines on devices of their own while a process is killed: over Gloo, and over a stand-in with NCCL's
semantics."""

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridrl.core import device as devices
from hybridrl.core.carried import Encoded
from hybridrl.core.weights.buckets import Bucket, SyncPlan, digest
from hybridrl.core.weights.sync import BroadcastSync

PROCESSES = multiprocessing.get_context("fork")
PLAN = SyncPlan([Bucket([], 64), Bucket([], 128)], [])
SECONDS = 3.0  # of a group: NCCL's watchdog ends a process that waited for longer
KILLED_BY_WATCHDOG = 134


class Nccl:
    """ProcessGroupNCCL as in torch 2.11 to 2.13, over Gloo: a peer that dies is not noticed. `wait` returns at once,
    and a watchdog ends the process after the time limit; created with blocking wait, it lasts until then and raises.
    """

    Options = SimpleNamespace

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        self.blocking = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1"
        self.seconds, self.aborted = options._timeout.total_seconds(), threading.Event()
        gloo = dist.ProcessGroupGloo._Options()  # pyrefly: ignore[missing-attribute]  # it is, in torch's C++
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        gloo._timeout = options._timeout * 100
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, gloo)

    def broadcast(self, tensor: torch.Tensor, root: int) -> "NcclWork":
        return NcclWork(self, self.gloo.broadcast(tensor, root))

    def abort(self) -> None:
        self.aborted.set()


class NcclWork:
    running: "NcclWork | None" = None  # what synchronize waits for

    def __init__(self, group: Nccl, work: dist.Work) -> None:
        self.group, self.work, self.done = group, work, threading.Event()
        NcclWork.running = self
        threading.Thread(target=self._run, daemon=True).start()
        if not group.blocking:
            threading.Thread(target=self._watch, daemon=True).start()

    def _run(self) -> None:
        try:
            self.work.wait()
            self.done.set()
        except RuntimeError:
            pass  # the kernel spins

    def _watch(self) -> None:
        if not self.done.wait(self.group.seconds):
            os._exit(KILLED_BY_WATCHDOG)

    def wait(self) -> None:
        if not self.group.blocking:
            return
        deadline = time.monotonic() + self.group.seconds
        while not self.finished():
            if time.monotonic() > deadline:
                raise RuntimeError("timed out in blocking wait")
            time.sleep(0.01)

    def finished(self) -> bool:
        return self.done.is_set() or self.group.aborted.is_set()


def synchronize(device: str) -> None:
    while NcclWork.running is not None and not NcclWork.running.finished():
        time.sleep(0.01)


@dataclass
class Trainer:
    """The sending rank; its weights are the number of the sync."""

    kind: str
    weights: int = 0
    buckets: dict[int, torch.Tensor] = field(default_factory=dict)

    def plan_weights(self, dtype: str, limit: int) -> SyncPlan:
        return PLAN

    def forward(self, name: str, row: Any, micro_batches: Any, spec: None, rounding: str) -> tuple:
        self.weights += not rounding
        return [[-1.0]], 0

    def fill_bucket(self, bucket: Bucket, shared: bool) -> tuple[None, int]:
        self.buckets[bucket.bytes] = torch.full((bucket.bytes,), self.weights, dtype=torch.uint8)
        return None, digest(self.buckets[bucket.bytes])

    def listen(self) -> str:
        self.listener = devices.listen("127.0.0.1")
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    def join_engines(self, address: str, size: int, seconds: float) -> None:
        self.group = devices.BroadcastGroup(self.kind, address, self.listener, 0, size, seconds)

    def send_bucket(self, bucket: Bucket) -> None:
        self.group.broadcast(self.buckets[bucket.bytes])

    def release_buckets(self, reader_died: bool = False) -> None:
        return None


@dataclass
class Engine:
    """A rollout server, which is killed in the call `dies_in` (a method, and the size of a bucket)."""

    kind: str
    dies_in: tuple[str, int] | None = None
    received: list[int] = field(default_factory=list)

    def _die(self, method: str, size: int = 0) -> None:
        if self.dies_in == (method, size):
            os.kill(os.getpid(), signal.SIGKILL)

    def begin_weights(self) -> None:
        self.received = []

    def join_trainer(self, address: str, rank: int, size: int, seconds: float) -> None:
        self._die("join_trainer")
        self.group = devices.BroadcastGroup(self.kind, address, None, rank, size, seconds)

    def load_bucket(self, bucket: Bucket, handles: list, digests: list[int], adapter: bool) -> None:
        self._die("load_bucket", bucket.bytes)
        tensor = torch.empty(bucket.bytes, dtype=torch.uint8)
        self.group.broadcast(tensor)
        assert [digest(tensor)] == digests
        self.received.append(int(tensor[0]))

    def finish_weights(self) -> None:
        return None

    def finish_sync(self, sync_id: int, version: int) -> list[int]:
        return self.received


def serve(actor: Trainer | Engine, pipe: Connection) -> None:
    dist.ProcessGroupNCCL = Nccl  # of a process of this test's
    devices.synchronize = synchronize
    while True:
        method, args = pipe.recv()
        try:
            pipe.send((True, getattr(actor, method)(*args)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))


class Actor:
    def __init__(self, instance: Trainer | Engine) -> None:
        self.pipe, other = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=serve, args=(instance, other), daemon=True)
        self.process.start()
        other.close()
        self.started = self.answered = 0
        self.answers: dict[int, tuple[bool, Any]] = {}

    def start(self, method: str, args: tuple) -> int:
        self.started += 1
        self.pipe.send((method, args))
        return self.started

    def answer(self) -> None:
        self.answered += 1
        try:
            self.answers[self.answered] = self.pipe.recv()
        except (EOFError, OSError):
            self.answers |= dict.fromkeys(range(self.answered, self.started + 1), (False, "an actor is dead"))

    def answer_to(self, number: int) -> list[tuple[bool, Any]]:
        return [self.answers[number]] if number in self.answers else []


class Workers:
    """Workers of the protocol of weights.sync, whose calls are made in processes; the first failure is raised."""

    def __init__(self, actors: list[Actor]) -> None:
        self.actors = actors

    def __len__(self) -> int:
        return len(self.actors)

    def only(self, ranks: Any) -> "Workers":
        return Workers([self.actors[rank] for rank in ranks])

    def broadcast(self, method: Any, *args: Any, timeout: float) -> list[Any]:
        return self.finish(self.start_each(method, [args] * len(self)), method, timeout=timeout)

    def scatter(self, method: Any, parts: Any, *, timeout: float) -> list[Any]:
        return self.finish(self.start_each(method, parts), method, timeout=timeout)

    def failures(self, method: Any, *args: Any, timeout: float) -> dict[int, str]:
        found = {}
        for rank in range(len(self)):
            try:
                self.only([rank]).broadcast(method, *args, timeout=timeout)
            except RuntimeError as error:
                found[rank] = str(error)
        return found

    def start_each(self, method: Any, parts: Any) -> list[tuple[Actor, int]]:
        pairs = zip(self.actors, parts, strict=True)
        try:
            return [(actor, actor.start(method.__name__, tuple(part))) for actor, part in pairs]
        except OSError as error:
            raise RuntimeError(f"{method.__name__}: an actor is dead") from error

    def finish(self, refs: Any, method: Any, *, timeout: float, about: str = "") -> list[Any]:
        deadline = time.monotonic() + timeout
        while missing := [actor for actor, number in refs if number not in actor.answers]:
            ready = wait([actor.pipe for actor in missing], max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError(f"{method.__name__}: no response within {timeout:g} s")
            for actor in missing:
                if actor.pipe in ready:
                    actor.answer()
            failed = [str(result) for actor, number in refs for well, result in actor.answer_to(number) if not well]
            if failed:
                raise RuntimeError(f"{method.__name__}: {failed[0]}")
        return [actor.answers[number][1] for actor, number in refs]


@pytest.fixture
def start():
    actors: list[Actor] = []

    def started(instance: Trainer | Engine) -> Actor:
        actors.append(Actor(instance))
        return actors[-1]

    yield started
    for actor in actors:
        actor.process.kill()
        actor.process.join()


def synced(trainer: Actor, engines: Workers) -> BroadcastSync:
    buckets = SimpleNamespace(update_weights_bucket_megabytes=1)
    rollout = SimpleNamespace(tensor_model_parallel_size=1, dtype="float32", checkpoint_engine=buckets)
    return BroadcastSync(
        Workers([trainer]), engines, rollout, probe=Encoded([1, 2]), train_dtype="float32", timeout=SECONDS
    )


@pytest.mark.slow
@pytest.mark.parametrize("dies_in", [("join_trainer", 0), ("load_bucket", 64), ("load_bucket", 128)])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_trainer_survives_an_engine_that_dies_and_sends_all_weights_to_its_successor(start, kind, dies_in):
    trainer = start(Trainer(kind))
    engines = Workers([start(Engine(kind)), start(Engine(kind, dies_in)), start(Engine(kind))])
    sync = synced(trainer, engines)
    with pytest.raises(RuntimeError, match="an actor is dead"):
        sync.publish(0)
    began = time.monotonic()
    sync.abort([1])
    assert time.monotonic() - began < SECONDS, "the others do not wait for one that is dead"
    engines.actors[1] = start(Engine(kind))
    sync.publish(1)
    assert engines.broadcast(Engine.finish_sync, 0, 0, timeout=1) == [[2, 2]] * 3
    assert trainer.process.is_alive()


class Dying(Trainer):
    """Killed as it sends its second bucket."""

    def send_bucket(self, bucket: Bucket) -> None:
        if bucket.bytes == 128:
            os.kill(os.getpid(), signal.SIGKILL)
        super().send_bucket(bucket)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_engines_survive_a_trainer_that_dies_and_get_all_weights_of_its_successor(start, kind):
    engines = Workers([start(Engine(kind)), start(Engine(kind))])
    with pytest.raises(RuntimeError, match=r"an actor is dead|[Cc]onnection (closed|reset)"):
        synced(start(Dying(kind)), engines).publish(0)
    synced(start(Trainer(kind)), engines).publish(1)
    assert engines.broadcast(Engine.finish_sync, 0, 0, timeout=1) == [[1, 1]] * 2
