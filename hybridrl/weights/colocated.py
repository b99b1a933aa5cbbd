"""Weight sync between training ranks and rollout servers on the same devices: buckets of weights in the ranks' memory,
which the engines open by handle and read in place."""

from collections.abc import Sequence
from typing import Any

import torch

from hybridrl.batch import Batch
from hybridrl.config.schema import RolloutConfig
from hybridrl.weights.layout import Bucket
from hybridrl.weights.sync import StaleWeights, WeightSource, WeightTarget, Workers

# Largest allowed differences between the probe's log-probs of engine and trainer after a weight sync: mean and maximum.
# In float32 1e-6 to 1e-5 were measured, and one update at the quickstart's learning rate causes more than 0.1. In
# bfloat16 rounding alone causes 0.04 to 0.07, and 0.5 at a token whose expert it changes, so there the probe catches
# gross faults only; the digests prove that the bytes arrived. The coarser of the two types counts.
TOLERANCE = {"float32": (1e-4, 1e-4), "float16": (0.02, 0.5), "bfloat16": (0.1, 2.0)}


class ColocatedSync:
    """Implements WeightSync; create it once trainers and servers are built. Rank r shares its device with server
    r // tensor_model_parallel_size.

    `probe` is a fixed sequence of token ids whose log-probs prove each sync. `train_dtype` is the type that the
    trainers compute in.
    """

    def __init__(
        self,
        trainers: Workers,
        servers: Workers,
        rollout: RolloutConfig,
        *,
        probe: list[int],
        train_dtype: str,
        timeout: float,
    ) -> None:
        self.trainers, self.servers, self.timeout = trainers, servers, timeout
        self.tp_size = rollout.tensor_model_parallel_size
        self.tolerance = max(TOLERANCE[train_dtype], TOLERANCE[rollout.dtype or train_dtype])
        self.probe = probe
        self.sync_id = 0  # counts syncs: a version that is published again gets a new one
        self.version = -1
        self.servers_with_base: set[Any] = set()  # that have the model which an adapter is added to
        self.gaps: list[float] = []
        limit = rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
        self.plan = trainers.broadcast(WeightSource.plan_weights, rollout.dtype, limit, timeout=timeout)[0]

    def publish(self, version: int) -> None:
        row = probe_row(self.probe)
        columns = self.trainers.broadcast(WeightSource.log_probs, row, [[0]], 1.0, timeout=self.timeout)[0]
        self.expected = torch.tensor(columns[0])
        self.sync_id, self.version = self.sync_id + 1, version
        self._send_all(range(len(self.servers)))

    def restore(self, index: int) -> None:
        self._send_all([index])

    def _send_all(self, indices: Sequence[int]) -> None:
        """Send what these servers need: the model, or only the adapter to those that have its base already."""
        adapter, actors = self.plan.adapter, self.servers.actors
        if lacking := [index for index in indices if not (adapter and actors[index] in self.servers_with_base)]:
            without_base = self.servers.only(lacking)
            without_base.broadcast(WeightTarget.begin_weights, timeout=self.timeout)
            self._send(self.plan.model, lacking, adapter=False)
            without_base.broadcast(WeightTarget.finish_weights, timeout=self.timeout)
            self.servers_with_base.update(actors[index] for index in lacking)
        self._send(adapter, indices, adapter=True)
        servers = self.servers.only(indices)
        servers.broadcast(WeightTarget.finish_sync, self.sync_id, self.version, timeout=self.timeout)
        self.trainers.broadcast(WeightSource.release_buckets, timeout=self.timeout)

    def _send(self, buckets: list[Bucket], indices: Sequence[int], *, adapter: bool) -> None:
        """Send buckets to these servers; all ranks take part, as gathering is collective. While the servers read one
        bucket, the ranks fill the next one in the other half of their memory."""
        servers, reading = self.servers.only(indices), []
        for bucket in buckets:
            filled = self.trainers.broadcast(WeightSource.fill_bucket, bucket, timeout=self.timeout)
            shares = [filled[index * self.tp_size : (index + 1) * self.tp_size] for index in indices]
            parts = [
                (bucket, [handle for handle, _ in share], [sum_ for _, sum_ in share], adapter) for share in shares
            ]
            servers.finish(reading, WeightTarget.load_bucket, timeout=self.timeout)
            reading = servers.start_each(WeightTarget.load_bucket, parts)
        servers.finish(reading, WeightTarget.load_bucket, timeout=self.timeout)

    def abort(self, dead: Sequence[int]) -> None:
        self.servers.failures(WeightTarget.finish_weights, timeout=self.timeout)  # the others wait for more buckets
        read_by_dead = [(rank // self.tp_size in dead,) for rank in range(len(self.trainers))]
        self.trainers.scatter(WeightSource.release_buckets, read_by_dead, timeout=self.timeout)

    def verify(self, index: int | None = None) -> None:
        """Check the id of the sync, and compare log-probs of the probe between engine and trainer: both, since a small
        update moves log-probs by less than rounding does."""
        indices = list(range(len(self.servers))) if index is None else [index]
        servers = self.servers.only(indices)
        held = servers.broadcast(WeightTarget.held_sync, timeout=self.timeout)
        for server, sync_id in zip(indices, held, strict=True):
            if sync_id != self.sync_id:
                raise StaleWeights(
                    f"rollout server {server} computes with the weights of weight sync {sync_id}, but the trainer's "
                    f"are those of {self.sync_id}, so no responses are sampled"
                )
        scores = servers.broadcast(WeightTarget.score, self.probe, timeout=self.timeout)
        for server, log_probs in zip(indices, scores, strict=True):
            gaps = (torch.tensor(log_probs) - self.expected).abs()
            mean, largest = float(gaps.mean()), float(gaps.max())
            self.gaps.append(largest)
            if not (mean <= self.tolerance[0] and largest <= self.tolerance[1]):
                allowed = "{:g} and {:g}".format(*self.tolerance)
                raise StaleWeights(
                    f"after the weight sync, rollout server {server} differs from the trainer by {mean:.3g} on average "
                    f"and {largest:.3g} at most in the log-probs of a fixed sequence ({allowed} are allowed): it does "
                    "not compute with the trainer's weights, so no responses are sampled"
                )

    def take_metrics(self) -> dict[str, float]:
        """Return the largest difference of the probe's log-probs since the last call."""
        gaps, self.gaps = self.gaps, []
        return {"training/probe_log_prob_diff": max(gaps)} if gaps else {}


def probe_row(ids: list[int]) -> Batch:
    """Return the probe as a row: its first token is the prompt, the rest the response."""
    tokens, one = torch.tensor(ids), torch.ones(1, dtype=torch.int64)
    return Batch(
        prompt_lengths=one,
        response_lengths=one * (len(ids) - 1),
        prompt_ids=tokens[:1],
        response_ids=tokens[1:],
        group=one * 0,
        position=one * 0,
        sample=one * 0,
    )
