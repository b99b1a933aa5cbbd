"""The door between rollout and training: every device is in one of two modes, and weights pass through here alone.

    to_rollout     the critic leaves, wake the engines' weights, publish, the policy leaves, wake the cache, prove
    to_training    engines sleep, the policy returns (the critic when it is used, moments while the optimizer steps)

Weights before cache, so that the trainer's parameters and the cache never have to fit together. On CPU the same calls
are made in the same order; there they free nothing.
"""

import logging
from collections.abc import Collection
from enum import Enum
from pathlib import Path

import torch

from hybridrl import device as devices
from hybridrl.batch import Batch
from hybridrl.cluster import Actor, Group, Pending, RaySession, RemoteFailure, gather, kill, spawn
from hybridrl.config.schema import ModelConfig, RolloutConfig
from hybridrl.rollout.client import RolloutPool
from hybridrl.rollout.server import ENVIRONMENT, RolloutServer
from hybridrl.runtime.timer import Stopwatch
from hybridrl.training.worker import TrainWorker
from hybridrl.weights.layout import Bucket

logger = logging.getLogger(__name__)

# Differences of the probe's log-probs, engine against trainer, after a hand-over: on average, and at most. In float32
# 1e-6 to 1e-5 were measured, and one update at the quickstart's rate makes more than 0.1. In bfloat16 rounding alone
# makes 0.04 to 0.07, and 0.5 at a token whose expert it changes, so there the proof catches gross faults; the digests
# prove that the bytes arrived. The coarser type counts.
TOLERANCE = {"float32": (1e-4, 1e-4), "float16": (0.02, 0.5), "bfloat16": (0.1, 2.0)}
CHECK_SECONDS = 30.0


class Mode(Enum):
    TRAINING = "training"
    ROLLOUT = "rollout"


class StaleWeights(RuntimeError):
    """An engine does not hold the trainer's weights, so nothing may be sampled from it."""


class HybridEngine:
    """Training ranks and rollout servers on the same devices.

    The constructor starts the servers' processes, `start` their engines, and `ready` takes the probe, a fixed sequence
    of token ids whose log-probs prove each hand-over. `train_dtype` is the type that the trainers compute in.
    """

    def __init__(
        self,
        session: RaySession,
        trainers: Group,
        model: ModelConfig,
        rollout: RolloutConfig,
        *,
        train_dtype: str,
        logs: Path,
        startup_timeout: float,
        timeout: float,
    ) -> None:
        self.session, self.trainers, self.model, self.rollout = session, trainers, model, rollout
        self.logs, self.startup_timeout, self.timeout = logs, startup_timeout, timeout
        self.tolerance = max(TOLERANCE[train_dtype], TOLERANCE[rollout.dtype or train_dtype])
        self.width = rollout.tensor_model_parallel_size
        self.mode = Mode.TRAINING
        self.version = -1
        self.number = 0  # of the last hand-over
        self.with_base: set[int] = set()  # servers that have what an adapter is added to
        self.watch = Stopwatch()
        self.gaps: list[float] = []
        self.memory: dict[str, float] = {}
        indices = range(len(trainers) // self.width)
        actors = [self._spawn(index) for index in indices]
        self.servers = Group(actors, "rollout server", [self._log(index) for index in indices])

    # -- start -----------------------------------------------------------------------------------------------------

    def start(self, gpus: list[list[str]]) -> list[Pending]:
        """Have every server build its engine; `gpus` are those of each training rank. Returns what to wait for."""
        self.gpus = gpus
        return [self._start(index) for index in range(len(self.servers))]

    def ready(self, probe: list[int]) -> None:
        """Call once servers and trainers are built: plans the hand-over."""
        self.probe = torch.tensor(probe)
        limit = self.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
        plans = self.trainers.broadcast(TrainWorker.plan_weights, self.rollout.dtype, limit, timeout=self.timeout)
        self.hand_over = plans[0]
        self.pool = RolloutPool(
            self.servers.actors,
            self._revive,
            capacity=self.rollout.max_num_seqs,
            timeout=self.rollout.request_timeout,
            retries=self.rollout.request_retries,
            fixed=self.rollout.full_determinism,
        )

    def sleep(self) -> None:
        """Put the servers to sleep for the first time."""
        self.servers.broadcast(RolloutServer.sleep, timeout=self.timeout)

    def _spawn(self, index: int) -> Actor:
        environment = devices.environment(self.session.device, self.session.per_machine) | ENVIRONMENT
        if self.rollout.dtype == "float32":
            environment |= {"TRITON_F32_DEFAULT": "ieee"}  # by default Triton rounds the factors of products to TF32
        # Control calls must get through while requests run: an asynchronous actor takes as many as come.
        first = index * self.width
        return spawn(RolloutServer, self.session, first, environment, self._log(index), max_concurrency=1000)

    def _log(self, index: int) -> str:
        return str(self.logs / f"rollout-{index}.log")

    def _start(self, index: int) -> Pending:
        ranks = range(index * self.width, (index + 1) * self.width)
        gpus = [str(gpu) for rank in ranks for gpu in self.gpus[rank]]
        slots = self.session.per_machine // self.width
        return self.servers.actors[index].start.remote(self.session.device, gpus, self.model, self.rollout, slots)

    # -- the switch ------------------------------------------------------------------------------------------------

    def to_rollout(self, version: int) -> None:
        """Make the engines ready to generate with the trainer's weights; nothing happens where they are already."""
        if self.mode is Mode.ROLLOUT and self.version == version:
            return
        self.to_training()
        for retries_left in reversed(range(self.rollout.request_retries + 1)):
            self._replace_dead_servers()
            try:
                self.expected = self._hand_over()
                break
            except RemoteFailure:  # a server that died on the way is replaced, and all weights are sent again
                dead = self._dead_servers()
                if not retries_left or not dead:
                    raise
                self.servers.failures(RolloutServer.finish_weights, timeout=self.timeout)  # the others wait for more
                self._release_buckets(dead)
                self._move_trainers(to_host=True)  # an engine may need its cache's memory before it can sleep
                self._take_back()
        self.mode, self.version = Mode.ROLLOUT, version

    def _hand_over(self) -> torch.Tensor:
        """Give the devices and the weights to the engines; returns the log-probs that proved it."""
        with self.watch("update_weights"):
            expected = self._trainer_log_probs()
            self._move_trainers(to_host=True, policy=False)  # the critic has nothing to hand over
            self.servers.broadcast(RolloutServer.wake, "weights", timeout=self.timeout)
            self.number += 1
            self._publish(self.servers)
        with self.watch("switch"):
            self._move_trainers(to_host=True, critic=False)
            self.servers.broadcast(RolloutServer.wake, "kv_cache", timeout=self.timeout)
            self._prove(expected, range(len(self.servers)))
        return expected

    def _take_back(self) -> None:
        """Give the devices back to the trainers; servers that are dead are not heeded."""
        self.servers.failures(RolloutServer.sleep, timeout=self.timeout)
        self._move_trainers(to_host=False)

    def to_training(self) -> None:
        """Give the devices to the trainers; nothing happens where they have them."""
        if self.mode is Mode.TRAINING:
            return
        with self.watch("switch"):
            self._take_back()  # a server that died is replaced when it is next wanted
        self.mode = Mode.TRAINING

    def _move_trainers(self, *, to_host: bool, policy: bool = True, critic: bool = True) -> None:
        """Move what may leave the devices, and note the memory of the rank that holds most, in GiB."""
        moves = {"to_host": to_host, "policy": policy, "critic": critic}
        held = self.trainers.broadcast(TrainWorker.offload, timeout=self.timeout, **moves)
        for name in held[0]:
            self.memory[f"perf/{name}"] = max(rank[name] for rank in held)

    def _publish(self, servers: Group) -> None:
        """Hand the weights over to these servers: all of them, or an adapter alone where its base is there already."""
        indices = [self.servers.actors.index(actor) for actor in servers.actors]
        adapter = self.hand_over.adapter
        if lacking := [index for index in indices if not (adapter and index in self.with_base)]:
            without = self.servers.only(lacking)
            without.broadcast(RolloutServer.begin_weights, timeout=self.timeout)
            self._send(self.hand_over.model, lacking, adapter=False)
            without.broadcast(RolloutServer.finish_weights, timeout=self.timeout)
            self.with_base.update(lacking)
        self._send(adapter, indices, adapter=True)
        servers.broadcast(RolloutServer.finish_hand_over, self.number, timeout=self.timeout)
        self.trainers.broadcast(TrainWorker.release_buckets, timeout=self.timeout)

    def _release_buckets(self, dead: Collection[int]) -> None:
        """Have the ranks free their buckets, also those that servers of these numbers were to read."""
        for index in dead:
            kill(self.servers.actors[index])  # one that is silent may live, and read still
        read_by_dead = [(rank // self.width in dead,) for rank in range(len(self.trainers))]
        self.trainers.scatter(TrainWorker.release_buckets, read_by_dead, timeout=self.timeout)

    def _send(self, buckets: list[Bucket], indices: list[int], *, adapter: bool) -> None:
        """Buckets to the servers of these numbers; every rank gathers, as that is a collective. While the servers read
        one bucket, the ranks gather the next into the other half of their memory."""
        servers, reading = self.servers.only(indices), []
        for bucket in buckets:
            filled = self.trainers.broadcast(TrainWorker.fill_bucket, bucket, timeout=self.timeout)
            shares = [filled[index * self.width : (index + 1) * self.width] for index in indices]
            parts = [
                (bucket, [handle for handle, _ in share], [sum_ for _, sum_ in share], adapter) for share in shares
            ]
            servers.finish(reading, RolloutServer.load_bucket, timeout=self.timeout)
            reading = servers.start_each(RolloutServer.load_bucket, parts)
        servers.finish(reading, RolloutServer.load_bucket, timeout=self.timeout)

    def _trainer_log_probs(self) -> torch.Tensor:
        """The trainer's log-probs of the probe; every rank computes them, the first one's count."""
        row = probe_row(self.probe)
        columns = self.trainers.broadcast(TrainWorker.log_probs, row, [[0]], 1.0, timeout=self.timeout)[0]
        return torch.tensor(columns[0])

    def _prove(self, expected: torch.Tensor, indices: range) -> None:
        """Refuse engines without the last hand-over, and compare each one's log-probs of the probe with the trainer's.

        Both, since a small update moves log-probs by less than rounding does.
        """
        held = self.servers.only(list(indices)).broadcast(RolloutServer.held, timeout=self.timeout)
        for index, number in zip(indices, held, strict=True):
            if number != self.number:
                raise StaleWeights(
                    f"rollout server {index} computes with the weights of hand-over {number}, and the trainer's are "
                    f"those of {self.number}, so no answers are sampled"
                )
        refs = [self.servers.actors[index].score.remote(self.probe.tolist()) for index in indices]
        for index, found in zip(indices, gather(refs, "rollout server.score", self.timeout), strict=True):
            gaps = (torch.tensor(found) - expected).abs()
            mean, largest = float(gaps.mean()), float(gaps.max())
            self.gaps.append(largest)
            if not (mean <= self.tolerance[0] and largest <= self.tolerance[1]):
                allowed = "{:g} and {:g}".format(*self.tolerance)
                raise StaleWeights(
                    f"after the hand-over, rollout server {index} differs from the trainer by {mean:.3g} on average "
                    f"and {largest:.3g} at most in the log-probs of a fixed sequence ({allowed} are allowed): it does "
                    "not compute with the trainer's weights, so no answers are sampled"
                )

    def _replace_dead_servers(self) -> None:
        """Rebuild, asleep, every server that does not answer."""
        dead = self._dead_servers()
        if not dead:
            return
        self._move_trainers(to_host=True)
        for index, cause in dead.items():
            logger.warning("rollout server %d was lost (%s); rebuilding it", index, cause)
            self._rebuild(index)
            self.pool.replace(index, self.servers.actors[index])
            self.servers.only([index]).broadcast(RolloutServer.sleep, timeout=self.timeout)
        self._move_trainers(to_host=False)

    def _dead_servers(self) -> dict[int, str]:
        return self.servers.failures(RolloutServer.check, timeout=CHECK_SECONDS)

    def _rebuild(self, index: int) -> None:
        kill(self.servers.actors[index])
        self.with_base.discard(index)
        self.servers.actors[index] = self._spawn(index)
        gather([self._start(index)], "rollout server.start", self.startup_timeout, [self._log(index)])

    def _revive(self, index: int) -> Actor:
        """Replace a server that was lost while generating by a new one with the same weights."""
        self._rebuild(index)
        self._move_trainers(to_host=False, critic=False)
        self._publish(self.servers.only([index]))
        self._move_trainers(to_host=True, critic=False)
        self._prove(self.expected, range(index, index + 1))
        return self.servers.actors[index]

    def take_metrics(self) -> dict[str, float]:
        """Seconds of the switch and the largest gap of a proof since the last call; servers lost since the start."""
        metrics = self.watch.take() | self.memory
        if self.gaps:
            metrics["training/probe_log_prob_diff"] = max(self.gaps)
        metrics["rollout/engine_restarts"] = self.pool.restarts
        metrics["rollout/retried_requests"] = self.pool.retried
        self.gaps = []
        return metrics


def probe_row(ids: torch.Tensor) -> Batch:
    """The probe as a row: its first token is the prompt, the rest the response."""
    one = torch.ones(1, dtype=torch.int64)
    return Batch(
        prompt_lengths=one,
        response_lengths=one * (len(ids) - 1),
        prompt_ids=ids[:1],
        response_ids=ids[1:],
        group=one * 0,
        position=one * 0,
        sample=one * 0,
    )
