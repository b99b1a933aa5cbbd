"""The cost of sending rows between the driver and its ranks: `python scripts/benchmark/data_plane.py`

2,048 rows of up to 2,048 tokens, 30% filled, with ids, a mask and two float32 fields, are sent to two Ray actors, and
one column is returned: with the calls of a run's log-probs but without a model, and through Ray, padded as in verl, as
a TensorDict of nested tensors, and as one in files that are mapped into memory.
Then the work of the driver (planning, packing, reordering results) for more rows and more ranks, which are stand-ins.
"""

import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import ray
import torch
from side_by_side import Row, arguments, formatted, in_turn, report
from tensordict import TensorDict
from torch import Tensor

from hybridrl.core.algorithms.algorithm import ForwardSpec
from hybridrl.core.batch import Batch
from hybridrl.core.cluster import Group
from hybridrl.core.training.learner import RankModel
from hybridrl.core.training.planning import MicroBatchBudget
from hybridrl.core.training.worker import Columns
from hybridrl.core.training.worker_group import RankPlan, TrainWorkers
from hybridrl.required import required
from hybridrl.runtime.environment import worker_environment

FILLED, WORKERS = 0.3, 2
DRIVER = ((2, 512), (2, 2048), (16, 2048), (64, 8192), (256, 32768), (1024, 131072))  # ranks, and rows for them
NOTHING: Any = None  # stand-ins read neither a model nor a plan
MODEL = RankModel(NOTHING, NOTHING, MicroBatchBudget(16384))


def column_of(batch: Batch, micro_batches: list[list[int]]) -> Columns:
    """Return a column that identifies the rows, in the form of a rank's log-probs."""
    parts = [batch.select(rows).rollout_log_probs for rows in micro_batches if rows]
    return [torch.cat(parts).numpy() if parts else np.zeros(0, dtype=np.float32), None, None, None]


class StandIn:
    """A rank without a model."""

    def forward(self, name: str, batch: Batch, micro_batches: list[list[int]], spec: ForwardSpec) -> Columns:
        return column_of(batch, micro_batches)

    def padded(self, rows: dict[str, Tensor]) -> Tensor:
        return rows["log_probs"] + 0.0

    def nested(self, content: Any, rows: list[int]) -> np.ndarray:
        parts = content["rollout_log_probs"].unbind()
        return torch.cat([parts[row] for row in rows]).numpy()

    def mapped(self, directory: str, rows: list[int]) -> np.ndarray:
        content = TensorDict.load_memmap(directory)
        return required(Batch(**dict(content.items())).select(rows).rollout_log_probs).numpy()


class Recorded(Group):
    """Ranks on the driver's own thread, whose time is counted separately; counts the bytes that would be sent."""

    def __init__(self, ranks: int) -> None:
        super().__init__([None] * ranks, "stand-in", [])
        self.shared = self.messages = 0
        self.rank_seconds = 0.0

    def share(self, value: Any) -> Any:
        buffers: list[pickle.PickleBuffer] = []
        text = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        raw = b"".join(buffer.raw() for buffer in buffers)  # the copy into shared memory
        self.shared += len(text) + len(raw)
        return value

    def scatter(self, method: Callable[..., Any], parts: Sequence[tuple], *, timeout: float, **_: Any) -> list[Any]:
        began = time.perf_counter()
        self.messages += sum(len(pickle.dumps(part[2:], protocol=5)) for part in parts)
        columns = [column_of(batch, micro_batches) for _, batch, micro_batches, *_ in parts]
        self.rank_seconds += time.perf_counter() - began
        return columns


def rows(count: int, width: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths: Any = torch.distributions.LogNormal(0.0, 0.6).sample((count,)) if count else torch.zeros(0)
    lengths = (lengths / lengths.mean() * FILLED * width).long().clamp(2, width - 1)
    tokens = int(lengths.sum())
    numbers, values = torch.arange(count), torch.rand(tokens, generator=generator)
    ids = torch.randint(0, 150_000, (tokens,), generator=generator, dtype=torch.int32)
    return Batch(
        prompt_lengths=torch.ones(count, dtype=torch.int64),
        response_lengths=lengths,
        prompt_ids=torch.ones(count, dtype=torch.int32),
        response_ids=ids,
        group=numbers // 8,
        position=numbers // 8,
        sample=numbers % 8,
        response_mask=torch.ones(tokens, dtype=torch.bool),
        rollout_log_probs=values,
        advantages=values,
    )


class AllFields(TrainWorkers):
    """Forward passes for which all fields are sent."""

    def forward_log_probs(self, batch: Batch) -> Batch:
        (column, *_) = self._forward("actor", batch, ForwardSpec())
        return replace(batch, old_log_probs=column)


def stand_in_workers(group: Group) -> AllFields:
    return AllFields(group, RankPlan({"actor": MODEL}, NOTHING), "float32", 60.0)


def as_tensordict(batch: Batch, actors: list[Any]) -> dict[str, Callable[[], Tensor]]:
    """Return the exchanges through a TensorDict, by name, whose rows are assigned in advance.
    The files are in shared memory, and have to be on the machine of every rank."""
    halves = [list(range(rank, len(batch), WORKERS)) for rank in range(WORKERS)]
    rows = torch.tensor(halves).flatten()
    by_rank, order = batch.select(rows).only(), rows.argsort()

    def column(calls: list[Any]) -> Tensor:
        values = torch.from_numpy(np.concatenate(ray.get(calls)))
        return replace(by_rank, rollout_log_probs=values).select(order).rollout_log_probs

    def nested() -> Tensor:
        content = ray.put(batch.to_tensordict())
        return column([actor.nested.remote(content, half) for actor, half in zip(actors, halves, strict=True)])

    def mapped() -> Tensor:
        directory = tempfile.mkdtemp(dir="/dev/shm")
        TensorDict({name: value for name, _, value in batch.filled()}).memmap(directory)
        values = column([actor.mapped.remote(directory, half) for actor, half in zip(actors, halves, strict=True)])
        shutil.rmtree(directory)
        return values

    return {"nested tensors in a TensorDict": nested, "a memory-mapped TensorDict": mapped}


def through_ray(count: int, width: int, rounds: int) -> list[Row]:
    ray.init(address="local", include_dashboard=False, log_to_driver=False, object_store_memory=2 << 30)
    environment = worker_environment("cpu", WORKERS)  # as for a run's ranks
    remote = ray.remote(StandIn).options(num_cpus=0, runtime_env={"env_vars": environment})
    actors: list[Any] = [remote.remote() for _ in range(WORKERS)]
    workers, batch = stand_in_workers(Group(actors, "stand-in", [])), rows(count, width)
    pad = batch.padded
    ids, mask = pad(batch.response_ids).long(), pad(batch.response_mask).long()
    padded = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(1) * mask}
    padded |= {"responses": ids.clone(), "response_mask": mask.clone()}
    padded |= {"log_probs": pad(batch.rollout_log_probs), "advantages": pad(batch.advantages)}
    half = count // WORKERS

    def packed_exchange() -> Tensor:
        return workers.forward_log_probs(batch).old_log_probs

    def padded_exchange() -> Tensor:
        parts = [{name: value[n * half : (n + 1) * half] for name, value in padded.items()} for n in range(WORKERS)]
        return torch.cat(ray.get([actor.padded.remote(part) for actor, part in zip(actors, parts, strict=True)]))

    assert torch.equal(packed_exchange(), batch.rollout_log_probs)
    assert torch.equal(padded_exchange()[batch.padded(torch.ones_like(batch.rollout_log_probs)) > 0], packed_exchange())
    others = as_tensordict(batch, actors)
    assert all(torch.equal(exchange(), batch.rollout_log_probs) for exchange in others.values())
    # Many rounds: a round takes half as long again if the object store uses pages that a process has not touched yet.
    seconds = in_turn({"packed": packed_exchange, "padded": padded_exchange} | others, rounds)
    ray.shutdown()
    packed_seconds, padded_seconds = seconds["packed"], seconds["padded"]
    what = f"{count:,} rows of {width:,} tokens, {FILLED:.0%} filled, to {WORKERS} workers and a column back"
    ratio = padded_seconds.median / packed_seconds.median
    cells = formatted(packed_seconds, "ms"), f"padded: {formatted(padded_seconds, 'ms')}"
    speed = [Row(what, *cells, ratio, "at least 20 (aim 40)")]
    for name in others:
        ratio = seconds[name].median / packed_seconds.median
        speed.append(Row("the same, planned in advance", cells[0], f"{name}: {formatted(seconds[name], 'ms')}", ratio))
    size = sum(value.nbytes for value in batch.__getstate__().values()) / count
    wide = sum(value.nbytes for value in padded.values()) / count
    cells = f"{size / 1e3:.2f} kB", f"{wide / 1e3:.1f} kB"
    return [*speed, Row("bytes per row of that batch", *cells, size / 1e3, "at most 8.5 (aim 7) kB")]


def on_the_driver(most: int, width: int) -> list[Row]:
    """Return the driver's time for two and more ranks."""
    table = []
    for ranks, count in DRIVER:
        if ranks > most:
            break
        group, seconds, batch = Recorded(ranks), [], rows(count, width)
        for _ in range(3):
            group.shared = group.messages = 0
            group.rank_seconds, began = 0.0, time.perf_counter()
            stand_in_workers(group).forward_log_probs(batch)
            seconds.append(time.perf_counter() - began - group.rank_seconds)
        tokens = int(batch.response_lengths.sum())
        share = f"{1e9 * median(seconds) / tokens:.1f} ns per token"
        sizes = f"{group.shared / 2**20:.1f} MiB once per machine, {group.messages / ranks / 1e3:.1f} kB per rank"
        table.append(Row(f"driver, {count:,} rows on {ranks:,} ranks", f"{1e3 * median(seconds):.1f} ms", sizes))
        print(f"{ranks:>5} ranks {count:>7} rows: {1e3 * median(seconds):8.1f} ms, {share}, {sizes}", flush=True)
    return table


def main() -> None:
    parser = arguments(__doc__, rows=64, tokens=64, rounds=1, ranks=16)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=2048, help="of the longest row")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=DRIVER[-1][0], help="most stand-ins")
    options = parser.parse_args()
    torch.set_num_threads(1)
    Batch.only = lambda self, *names: self  # all fields are sent, also those that log-probs do not need
    exchanged = through_ray(options.rows, options.tokens, options.rounds)
    report([*exchanged, *on_the_driver(options.ranks, options.tokens)], options.json)


if __name__ == "__main__":
    main()
