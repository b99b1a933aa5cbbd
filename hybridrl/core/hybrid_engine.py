"""Gives the devices to rollout or to training, and brings the trainers' weights to the engines.

`HybridEngine` time-shares the devices: each device is in one of two modes.

    to_rollout: critic to the host, wake the engines' weights, publish, policy to the host, wake the cache, verify
    to_training: engines sleep, policy to the devices (the critic when it is used, moments while the optimizer steps).

Weights come before the cache, so that the trainer's parameters and the cache never have to fit together. The exception
is the rebuild of a dead server during a rollout. On CPU the same calls are made in the same order; there they free
nothing. `SeparateEngine` has separate devices for rollout and training.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from hybridrl.core.cluster import Group, Pending, RemoteFailure
from hybridrl.core.rollout.client import ModeError
from hybridrl.core.rollout.fleet import RemoteServer, RolloutFleet
from hybridrl.core.training.worker import TrainWorker
from hybridrl.core.weights.sync import WeightSync
from hybridrl.runtime.stacks import memory_by_role
from hybridrl.tracking.sink import Stopwatch

logger = logging.getLogger(__name__)


class Mode(Enum):
    TRAINING = "training"
    ROLLOUT = "rollout"


class HybridEngine:
    """Training ranks and rollout servers on the same devices. At the start all are built, and the servers sleep.

    Callers use the ranks through `trainers` and the servers through `client`; both raise ModeError in the wrong mode.
    """

    shared = True  # whether ranks and servers take turns on the devices

    def __init__(self, trainers: Group, fleet: RolloutFleet, sync: WeightSync, *, timeout: float) -> None:
        self.ranks, self.fleet, self.sync, self.timeout = trainers, fleet, sync, timeout
        self.trainers = TrainingModeGroup(trainers, self)
        self.client = fleet.client(self._revive)
        self.version = -1
        self.watch = Stopwatch()
        self.memory: dict[str, float] = {}
        self.rebuilding = threading.Lock()  # the client rebuilds servers in threads
        self.check_memory: Callable[[], None] = lambda: None  # raises if awake engines leave too little memory
        self._enter(Mode.TRAINING)

    @property
    def weights(self) -> str:
        """Digests of the weights that the engines have in rollout mode: equal for equal weights."""
        return self.sync.weights

    def to_rollout(self, version: int) -> None:
        """Prepare the engines to generate with the trainer's weights; does nothing if they are prepared already."""
        if self.mode is Mode.ROLLOUT and self.version == version:
            return
        self.to_training()
        for retries_left in reversed(range(self.fleet.rollout.request_retries + 1)):
            self._rebuild_dead_servers()
            self.check_memory()
            try:
                self._switch(version)
                break
            except RemoteFailure as failure:  # a server that died is rebuilt, and all weights are sent again
                dead = self.fleet.find_dead(failure.silent)
                if not retries_left or not dead:
                    raise
                logger.warning("the weight sync failed, and is repeated: %s", failure)
                for index, cause in dead.items():
                    self.fleet.note_death(index, cause)
                self.fleet.kill(list(dead))  # a silent one may live and still read the buckets, which are freed next
                self.sync.abort(list(dead))
                self._move_trainers(to_host=True)  # an engine may need its cache's memory before it can sleep
                self._return_devices()
        self.version = version
        self._enter(Mode.ROLLOUT)

    def _switch(self, version: int) -> None:
        with self.watch("update_weights"):
            self._move_trainers(to_host=True, actor=False)  # other models have nothing to publish
            self.fleet.wake("weights")
            self.sync.publish(version)
        with self.watch("switch"):
            self._move_trainers(to_host=True, others=False)
            self.fleet.wake("kv_cache")
            self.sync.verify()

    def to_training(self) -> None:
        """Give the devices to the trainers; does nothing if they have them."""
        if self.mode is Mode.ROLLOUT:
            with self.rebuilding, self.watch("switch"):
                self._return_devices()
            self._enter(Mode.TRAINING)

    def _return_devices(self) -> None:
        if self.shared:
            self.fleet.sleep(kill_failed=True)
        self._move_trainers(to_host=False)

    def _enter(self, mode: Mode) -> None:
        self.mode, self.client.available = mode, mode is Mode.ROLLOUT or not self.shared

    def _move_trainers(self, *, to_host: bool, actor: bool = True, others: bool = True) -> None:
        """Move the models, and record the memory of the rank with the most in use or the least free, in GiB."""
        if to_host and not self.shared:
            return
        moves = {"to_host": to_host, "actor": actor, "others": others}
        memory = self.ranks.broadcast(TrainWorker.offload, timeout=self.timeout, **moves)
        for name in memory[0]:
            worst = min if name.endswith("free_gb") else max
            self.memory[f"perf/{name}"] = worst(rank[name] for rank in memory)

    def _rebuild_dead_servers(self) -> None:
        """Rebuild every server that does not respond, and put it to sleep."""
        if dead := self.fleet.find_dead():
            self._move_trainers(to_host=True)
            for index, cause in list(dead.items()):
                message = "rollout server %d was lost (%s); rebuilding it"
                logger.warning(message, index, cause, extra={"code": "server-lost"})
                self.fleet.note_death(index, cause)
                self._rebuild(index, asleep=True)
                self.client.replace(index, self.fleet.handle(index))
            self._move_trainers(to_host=False)

    def rebuild_servers(self) -> None:
        """Replace all servers by new ones before the next weight sync."""
        self.fleet.replace_all("trainer.on_diagnosis=rebuild")

    def _rebuild(self, index: int, *, asleep: bool = False) -> None:
        self.fleet.rebuild(index, asleep=asleep and self.shared)
        self.client.capacity = self.fleet.rollout.max_num_seqs  # less, if an engine ran out of memory

    def _revive(self, index: int) -> RemoteServer | None:
        """Rebuild a server that died while generating, with the same weights. The others keep generating."""
        with self.rebuilding:
            self._rebuild(index)
            self._move_trainers(to_host=False, others=False)
            self.sync.restore(index)
            self._move_trainers(to_host=True, others=False)
            self.sync.verify(index)
        return self.fleet.handle(index)

    def take_metrics(self) -> dict[str, float]:
        """Return seconds, the engines' statistics and the probe's gap since the last call, memory, and the servers
        that died since the start."""
        lost = {f"rollout/retried_requests/{reason}": count for reason, count in self.client.retried.items()}
        lost |= {"rollout/engine_restarts": self.client.restarts}
        memory = self.memory | memory_by_role(self.ranks.logs)
        metrics = self.watch.take() | memory | self.sync.take_metrics() | self.fleet.take_metrics() | lost
        if "perf/weights_gb" in metrics:
            metrics["perf/weights_gb_per_s"] = metrics["perf/weights_gb"] / metrics["timing_s/update_weights"]
        return metrics


class SeparateEngine(HybridEngine):
    """Training ranks and rollout servers on different devices, where the engines never sleep.

    In training mode they continue with the weights of the last sync. In rollout mode the trainers do nothing, and still
    have the weights of the engines: a server that dies then gets them again at once, otherwise with the next sync.
    `pause` interrupts generation before the weights change.
    """

    shared = False

    def __init__(self, trainers: Group, fleet: RolloutFleet, sync: WeightSync, *, timeout: float) -> None:
        super().__init__(trainers, fleet, sync, timeout=timeout)
        self.pause: Callable[[], None] = lambda: None
        self.waiting_for_weights: set[int] = set()  # servers that were rebuilt
        self.weights_lock = threading.Lock()  # held while weights are restored, or training begins

    def to_rollout(self, version: int) -> None:
        """Give the engines the trainer's weights; the trainers wait. Requests in flight are paused: their owner resumes
        them."""
        self.pause()
        if self.version == version and not self.waiting_for_weights:
            self._enter(Mode.ROLLOUT)
        else:
            super().to_rollout(version)
        for index in self.waiting_for_weights:
            self.client.replace(index, self.fleet.handle(index))
        self.waiting_for_weights.clear()

    def _switch(self, version: int) -> None:
        with self.watch("update_weights"):
            self.sync.publish(version)
            self.sync.verify()

    def to_training(self) -> None:
        """Give the trainers the weights to train; the engines continue."""
        if self.mode is Mode.ROLLOUT:
            with self.weights_lock:
                self._enter(Mode.TRAINING)
            self._return_devices()

    def _rebuild(self, index: int, *, asleep: bool = False) -> None:
        self.waiting_for_weights.discard(index)
        super()._rebuild(index, asleep=asleep)

    def _revive(self, index: int) -> RemoteServer | None:
        """Rebuild a server that died while generating; None if it has to wait for weights."""
        with self.rebuilding:
            self._rebuild(index)
        with self.weights_lock:
            if self.mode is Mode.TRAINING:
                self.waiting_for_weights.add(index)
                return None
            self.sync.restore(index)
            self.sync.verify(index)
        return self.fleet.handle(index)


class TrainingModeGroup(Group):
    """The training ranks for all other callers: a call that needs the devices raises ModeError in rollout mode."""

    def __init__(self, ranks: Group, engine: HybridEngine) -> None:
        super().__init__(ranks.actors, ranks.role, ranks.logs)
        self.engine = engine

    def start_each(self, method: Callable[..., Any], parts: Sequence[tuple], **kwargs: Any) -> list[Pending]:
        name = method.__name__
        if self.engine.mode is Mode.ROLLOUT and name != TrainWorker.finished_save.__name__:
            raise ModeError(f"{name} was called while the devices are in rollout mode; call to_training first")
        return super().start_each(method, parts, **kwargs)
