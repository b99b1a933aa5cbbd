"""How rows travel between the driver and its ranks: `python scripts/benchmark/data_plane.py`

2,048 rows of up to 2,048 tokens, 30% filled, with ids, a mask and two float32 fields, go to two Ray actors, and one
column comes back: by the way that a run's log-probs take, less the model, and through Ray as verl pads such rows. Then
what the driver does (planning, packing, putting answers together) for more rows and more ranks, which stand-ins play.
"""

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
from side_by_side import Row, arguments, in_turn, report, told
from torch import Tensor

from hybridrl import device as devices
from hybridrl.batch import Batch
from hybridrl.cluster import Group
from hybridrl.training.packing import Budget
from hybridrl.training.worker import Columns
from hybridrl.training.worker_group import TrainWorkers

ROWS, WIDTH, FILLED, WORKERS = 2048, 2048, 0.3, 2
BUDGET = Budget(16384)


def answer(batch: Batch, passes: list[list[int]]) -> Columns:
    """A column that says which rows were seen, as a rank's log-probs come back."""
    found = [batch.select(rows).rollout_log_probs for rows in passes if rows]
    return [torch.cat(found).numpy() if found else np.zeros(0, dtype=np.float32), None, None, None]


class StandIn:
    """A rank without a model."""

    def log_probs(self, batch: Batch, passes: list[list[int]], temperature: float, **_: Any) -> Columns:
        return answer(batch, passes)

    def padded(self, rows: dict[str, Tensor]) -> Tensor:
        return rows["log_probs"] + 0.0


class Recorded(Group):
    """Ranks on the driver's own thread, whose time is told apart; counts the bytes that would travel."""

    def __init__(self, ranks: int) -> None:
        super().__init__([None] * ranks, "stand-in", [])
        self.shared = self.messages = 0
        self.away = 0.0

    def share(self, value: Any) -> Any:
        buffers: list[pickle.PickleBuffer] = []
        text = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        raw = b"".join(buffer.raw() for buffer in buffers)  # the copy into shared memory
        self.shared += len(text) + len(raw)
        return value

    def scatter(self, method: Callable[..., Any], parts: Sequence[tuple], *, timeout: float, **_: Any) -> list[Any]:
        began = time.perf_counter()
        self.messages += sum(len(pickle.dumps(part[1:], protocol=5)) for part in parts)
        found = [answer(batch, passes) for batch, passes, *_ in parts]
        self.away += time.perf_counter() - began
        return found


def rows(count: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.distributions.LogNormal(0.0, 0.6).sample((count,)) if count else torch.zeros(0)
    lengths = (lengths / lengths.mean() * FILLED * WIDTH).long().clamp(2, WIDTH - 1)
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
    """Forward passes, with a stand-in's method."""

    def log_probs(self, batch: Batch) -> Batch:
        options = {"reference_kl": False, "sum_pi_squared": False}
        (column, *_) = self._pass(StandIn.log_probs, batch, BUDGET, 1.0, **options)
        return replace(batch, old_log_probs=column)


def front(group: Group) -> AllFields:
    return AllFields(group, SimpleNamespace(), None, "float32", 60.0)


def through_ray() -> tuple[Row, Row]:
    ray.init(address="local", include_dashboard=False, log_to_driver=False, object_store_memory=2 << 30)
    environment = devices.environment("cpu", WORKERS)  # that of a run's ranks
    remote = ray.remote(StandIn).options(num_cpus=0, runtime_env={"env_vars": environment})
    actors = [remote.remote() for _ in range(WORKERS)]
    workers, batch = front(Group(actors, "stand-in", [])), rows(ROWS)
    rectangle = batch.padded
    ids, mask = rectangle(batch.response_ids).long(), rectangle(batch.response_mask).long()
    padded = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(1) * mask}
    padded |= {"responses": ids.clone(), "response_mask": mask.clone()}
    padded |= {"log_probs": rectangle(batch.rollout_log_probs), "advantages": rectangle(batch.advantages)}
    half = ROWS // WORKERS

    def packed_way() -> Tensor:
        return workers.log_probs(batch).old_log_probs

    def padded_way() -> Tensor:
        parts = [{name: value[n * half : (n + 1) * half] for name, value in padded.items()} for n in range(WORKERS)]
        return torch.cat(ray.get([actor.padded.remote(part) for actor, part in zip(actors, parts, strict=True)]))

    assert torch.equal(packed_way(), batch.rollout_log_probs)
    assert torch.equal(padded_way()[batch.padded(torch.ones_like(batch.rollout_log_probs)) > 0], packed_way())
    # Many rounds: where the object store lies on pages that a process has not seen yet, one takes half as long again.
    seconds = in_turn({"packed": packed_way, "padded": padded_way}, rounds=15)
    ray.shutdown()
    packed, beside = seconds["packed"], seconds["padded"]
    what = f"{ROWS:,} rows of {WIDTH:,} tokens, {FILLED:.0%} filled, to {WORKERS} workers and a column back"
    ratio = beside.median / packed.median
    speed = Row(what, told(packed, "ms"), f"padded: {told(beside, 'ms')}", ratio, "at least 20 (aim 40)")
    size = sum(value.nbytes for value in batch.__getstate__().values()) / ROWS
    wide = sum(value.nbytes for value in padded.values()) / ROWS
    return speed, Row(
        "bytes a row of that batch",
        f"{size / 1e3:.2f} kB",
        f"{wide / 1e3:.1f} kB",
        size / 1e3,
        "at most 8.5 (aim 7) kB",
    )


def on_the_driver() -> list[Row]:
    """What a thousand ranks would cost the controller."""
    found = []
    for ranks, count in ((2, 512), (2, 2048), (16, 2048), (64, 8192), (256, 32768), (1024, 131072)):
        group, seconds, batch = Recorded(ranks), [], rows(count)
        for _ in range(3):
            group.shared = group.messages = 0
            group.away, began = 0.0, time.perf_counter()
            front(group).log_probs(batch)
            seconds.append(time.perf_counter() - began - group.away)
        tokens = int(batch.response_lengths.sum())
        share = f"{1e9 * median(seconds) / tokens:.1f} ns a token"
        sizes = f"{group.shared / 2**20:.1f} MiB once a machine, {group.messages / ranks / 1e3:.1f} kB a rank"
        found.append(Row(f"driver, {count:,} rows on {ranks:,} ranks", f"{1e3 * median(seconds):.1f} ms", sizes))
        print(f"{ranks:>5} ranks {count:>7} rows: {1e3 * median(seconds):8.1f} ms, {share}, {sizes}", flush=True)
    return found


def main() -> None:
    given = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    Batch.only = lambda self, *names: self  # all fields travel, also those that log-probs need not
    report([*through_ray(), *on_the_driver()], given.json)


if __name__ == "__main__":
    main()
