"""Time of the computations on a batch outside a model: `python scripts/benchmark/planning.py [--only NAME]`

Rows to ranks, rows to micro-batches, attention over the rows of a micro-batch on CPU, GAE, and rows selected from a
batch. Each is compared with a first implementation: a loop with a heap, best fit decreasing, attention over padded
rows, a loop over time steps, an index per token. Where there is a single correct result, both must give it before they
are timed in turn on one thread.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from advantages import GAE, gae_loop
from advantages import rows as with_rewards
from side_by_side import Row, Seconds, arguments, formatted, in_turn, report
from torch import Tensor

from hybridrl.core.algorithms.estimators import gae
from hybridrl.core.batch import Batch, spans
from hybridrl.core.training.attention import attend
from hybridrl.core.training.packing import PackedRows, shared_beginnings
from hybridrl.core.training.planning import Forest, MicroBatchBudget, Pieces, balance, plan, plan_trees
from hybridrl.required import required

CAP = 16_384


def lengths_drawn(count: int) -> dict[str, np.ndarray]:
    """Return lengths of rows by the name of their distribution."""
    draw = np.random.default_rng(0)
    drawn = {
        "log-normal up to 4,096": np.clip(draw.lognormal(5.7, 1.1, count), 1, 4096),
        "uniform 1..2,048": draw.integers(1, 2049, count),
        "gamma, mean 1,000": np.clip(draw.gamma(4, 250, count), 20, 4096),
    }
    return {name: lengths.astype(np.int64) for name, lengths in drawn.items()}


def filling(lengths: np.ndarray) -> np.ndarray:
    """Return slightly longer rows, whose tokens fill micro-batches exactly."""
    missing = -int(lengths.sum()) % CAP
    return lengths + missing // len(lengths) + (np.arange(len(lengths)) < missing % len(lengths))


def row(what: str, times: dict[str, Seconds], detail: str = "", other: str = "", target: str = "") -> Row:
    """Return a row of two sides, ours first. Its value is milliseconds if there is a target, else the speed-up."""
    (_, ours), (name, theirs) = times.items()
    cells = f"{formatted(ours, 'ms')}{detail}", f"{name} {formatted(theirs, 'ms')}{other}"
    return Row(what, *cells, 1e3 * ours.median if target else theirs.median / ours.median, target)


# -- rows to ranks and micro-batches -------------------------------------------------------------------------------


def with_a_heap(lengths: list[int], ranks: int) -> list[list[int]]:
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        load, rank = heapq.heappop(loads)
        shares[rank].append(number)
        heapq.heappush(loads, (load + lengths[number], rank))
    return shares


def best_fit(lengths: list[int]) -> list[list[int]]:
    """Assign the longest row first, each to the fullest micro-batch with room for it."""
    spaces: list[tuple[int, int]] = []
    micro_batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        place = bisect_left(spaces, (lengths[number], 0))
        if place == len(spaces):
            spaces.append((CAP, len(micro_batches)))
            micro_batches.append([])
        space, chosen = spaces.pop(place)
        micro_batches[chosen].append(number)
        insort(spaces, (space - lengths[number], chosen))
    return micro_batches


def uneven(shares: list[list[int]], lengths: np.ndarray) -> float:
    """Return the worst rank's tokens relative to the mean, minus 1."""
    return max(int(lengths[share].sum()) for share in shares) * len(shares) / int(lengths.sum()) - 1


def ranks_table(part: int, rounds: int | None) -> Iterator[Row]:
    count = 8192 // part
    for name, lengths in lengths_drawn(count).items():
        listed = lengths.tolist()
        sides = {
            "ours": partial(balance, lengths, 64),
            "a heap": partial(with_a_heap, listed, 64),
        }
        ours, other = (f"; worst + {uneven(side(), lengths):.1e}" for side in sides.values())
        target = "at most 3 (aim 1) ms, + 1e-3 (aim 1e-4)"  # of a rank, relative to the mean
        yield row(f"{count:,} rows to 64 ranks, {name}", in_turn(sides, rounds or 21), ours, other, target)


def micro_batches_table(part: int, rounds: int | None) -> Iterator[Row]:
    count = 1024 // part
    drawn = lengths_drawn(count)
    tight = {f"{name}, all full": filling(lengths) for name, lengths in drawn.items()}
    for name, lengths in (drawn | tight).items():
        fewest, listed = -(-int(lengths.sum()) // CAP), lengths.tolist()
        sides = {
            "ours": partial(plan, Pieces.single(lengths), 1, MicroBatchBudget(CAP)),
            "best fit decreasing": partial(best_fit, listed),
        }
        ours, other = plan(Pieces.single(lengths), 1, MicroBatchBudget(CAP))[0], best_fit(listed)
        if sorted(number for rows in ours for number in rows) != list(range(count)):
            raise SystemExit(f"{name}: a row is in no micro-batch or in two")
        if any(int(lengths[rows].sum()) > CAP for rows in ours):
            raise SystemExit(f"{name}: a micro-batch is over the cap")
        details = f"; {len(ours)} micro-batches", f"; {len(other)} micro-batches"
        target = f"at most 5 (aim 1) ms; {fewest} + 1% micro-batches"  # as many as the sum of tokens needs
        what = f"{count:,} rows to micro-batches of 16,384, {name}"
        yield row(what, in_turn(sides, rounds or 21), *details, target)


# -- rows that begin alike -------------------------------------------------------------------------------------------

# Prompts, samples, tokens of a prompt and of responses, ranks, budget; targets of the fullest rank and of all tokens.
FORESTS = {
    "128 x 8, 300 + 1,000, 8 ranks": ((128, 8, (200, 400), (200, 1800), 8, 16_384), 1.01, 1.01),
    "128 x 8, 300 + 1,000, 64 ranks": ((128, 8, (200, 400), (200, 1800), 64, 16_384), 1.06, 1.05),
    "16 x 8, 1,024 + 64 to 128, 8 ranks": ((16, 8, (1024, 1024), (64, 128), 8, 16_384), 1.02, 1.0),
    "16 x 16, 8k + 500, 8 ranks": ((16, 16, (8000, 8400), (300, 700), 8, 32_768), 1.03, 1.0),
    "1,024 x 8, 300 + 1,250, 64 ranks": ((1024, 8, (200, 400), (250, 2250), 64, 16_384), 1.06, 1.05),
}


def forest_rows(prompts: int, samples: int, prompt: tuple[int, int], response: tuple[int, int]) -> Batch:
    draw = np.random.default_rng(0)
    of_prompts = draw.integers(prompt[0], prompt[1] + 1, prompts)
    texts = [draw.integers(0, 1 << 15, length, dtype=np.int32) for length in of_prompts]
    lengths = draw.integers(response[0], response[1] + 1, prompts * samples)
    group = torch.arange(prompts).repeat_interleave(samples)
    ids = np.concatenate([text for text in texts for _ in range(samples)])
    return Batch(
        torch.from_numpy(of_prompts.repeat(samples)), torch.from_numpy(lengths), torch.from_numpy(ids),
        torch.from_numpy(draw.integers(0, 1 << 15, lengths.sum(), dtype=np.int32)), group, group, group,
    )  # fmt: skip


def computed(batch: Batch, micro_batches: list[list[int]]) -> int:
    """Return how many tokens these rows need, where each micro-batch computes what its rows share once."""
    parts = [batch.select(rows) for rows in micro_batches if rows]
    return sum(int(part.lengths.sum() - shared_beginnings(part).sum()) for part in parts)


def trees_table(part: int, rounds: int | None) -> Iterator[Row]:
    for name, ((prompts, samples, prompt, response, ranks, tokens), most, again) in FORESTS.items():
        batch, budget = forest_rows(max(prompts // part, 2), samples, prompt, response), MicroBatchBudget(tokens)
        pieces, forest = Pieces.single(batch.lengths.numpy()), Forest.of([batch])
        plans = plan_trees(pieces, forest, ranks, budget)
        distinct = int(batch.lengths.sum() - required(forest).shared.sum())
        of_ranks = [computed(batch, planned) for planned in plans]
        detail = f"; all ranks compute {sum(of_ranks) / distinct:.3f} of the distinct tokens (at most {again})"
        fullest = max(of_ranks) * ranks / distinct
        yield Row(
            f"plan, {name}: fullest rank",
            f"{fullest:.3f}{detail}",
            "the mean of distinct tokens",
            fullest,
            f"at most {most}",
        )
        sides = {"ours": partial(Forest.of, [batch])}
        times = in_turn(
            {
                **sides,
                "plan": partial(plan_trees, pieces, forest, ranks, budget),
                "rows alone": partial(plan, pieces, ranks, budget),
            },
            rounds or 5,
        )
        yield Row(
            f"plan, {name}: order and shares",
            formatted(times["ours"], "ms"),
            "",
            1e3 * times["ours"].median,
            "at most 110 ms" if len(batch) == 8192 else "",
        )
        value = times["plan"].median / times["rows alone"].median
        yield Row(
            f"plan, {name}: time",
            formatted(times["plan"], "ms"),
            f"rows alone {formatted(times['rows alone'], 'ms')}",
            value,
            "at most 10",
        )


# -- attention -----------------------------------------------------------------------------------------------------


def over_padded_rows(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
    """Compute attention over rows padded to the longest; tensors are [1, heads, T, width]."""
    longest = int(lengths.max())
    places = spans(torch.full_like(lengths, longest), torch.arange(len(lengths)))
    places = places.view(-1, longest)[torch.arange(longest) < lengths[:, None]]
    padded = []
    for packed in (query, key, value):
        flat = packed.new_zeros(len(lengths) * longest, packed.shape[1], packed.shape[3])
        flat = flat.index_copy(0, places, packed[0].transpose(0, 1))
        padded.append(flat.view(len(lengths), longest, *flat.shape[1:]).transpose(1, 2))
    output = F.scaled_dot_product_attention(*padded, is_causal=True, enable_gqa=True)
    return output.transpose(1, 2).flatten(0, 1)[places][None]


def with_repeated_heads(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
    """Compute attention row by row, without enable_gqa."""
    shared, outputs = query.shape[1] // key.shape[1], []
    for q, k, v in zip(*(packed.split(lengths.tolist(), dim=2) for packed in (query, key, value)), strict=True):
        k, v = (tensor.repeat_interleave(shared, dim=1) for tensor in (k, v))
        outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2))
    return torch.cat(outputs, dim=1)


def row_by_row(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
    return attend(torch.nn.Identity(), query, key, value, None, packed=PackedRows.of(lengths.tolist()))[0]


def attention_table(part: int, rounds: int | None) -> Iterator[Row]:
    draw = torch.Generator().manual_seed(0)
    few, some, many = (max(count // part, 1) for count in (16, 128, 256))

    def tail(count: int, middle: float, most: int) -> Tensor:
        return (torch.randn(count, generator=draw) * 0.8 + middle).exp().long().clamp(20, most)

    shapes = {
        f"quickstart: {many} rows of 45-60, 2 heads": (2, 2, torch.randint(45, 61, (many,), generator=draw)),
        f"25M: {some} rows of 80-572, 6 heads (2 of keys)": (6, 2, 60 + tail(some, 5.0, 512)),
        f"0.5B: {few} rows up to 2,048, 14 heads (2 of keys)": (14, 2, tail(few, 6.4, 2048)),
    }
    for name, (heads, of_keys, lengths) in shapes.items():
        inputs = [
            torch.randn(1, int(lengths.sum()), count, 64, generator=draw).transpose(1, 2).requires_grad_()
            for count in (heads, of_keys, of_keys)
        ]

        def with_gradient(attention: Callable[..., Tensor], inputs: list[Tensor], lengths: Tensor) -> list[Tensor]:
            output = attention(*inputs, lengths)
            return [output, *torch.autograd.grad(output.square().sum(), inputs)]

        kinds = {"ours": row_by_row, "padded": over_padded_rows, "repeated heads": with_repeated_heads}
        sides = {label: partial(with_gradient, attention, inputs, lengths) for label, attention in kinds.items()}
        for results in zip(*(side() for side in sides.values()), strict=True):
            torch.testing.assert_close([results[0]] * 2, [*results[1:]], atol=1e-4, rtol=1e-4)
        times = in_turn(sides, rounds or 5)
        repeated = f"; with repeated heads {formatted(times.pop('repeated heads'), 'ms')}"
        yield row(f"attention and its gradient, {name} of 64", times, repeated)


# -- GAE and selecting rows ----------------------------------------------------------------------------------------


def gae_table(part: int, rounds: int | None) -> Iterator[Row]:
    torch.manual_seed(0)
    count = 1024 // part
    tail = (torch.randn(count) * 0.8 + 6).exp().long().clamp(20, 2047)
    tail[0] = 2048
    for name, lengths in (("full rows", torch.full((count,), 2048)), ("heavy-tailed rows", tail)):
        batch = with_rewards(lengths, group_size=1)
        rewards, values = (batch.padded(required(field)) for field in (batch.token_rewards, batch.values))
        steps = partial(gae_loop, rewards, values, batch.padded(required(batch.response_mask), fill=False))
        sides = {"ours": partial(gae, batch, **GAE), "time steps": steps}
        torch.testing.assert_close(batch.padded(gae(batch, **GAE)[0]), steps(), atol=1e-5, rtol=0)
        what = f"GAE [{count}, 2048], {name}"
        yield row(what, in_turn(sides, rounds or 9), target="at most 100 (aim 45) ms")


def with_an_index(batch: Batch, rows: Tensor) -> Batch:
    """Select rows by advanced indexing."""
    index = {
        "row": rows,
        "prompt": spans(batch.prompt_lengths, rows),
        "response": spans(batch.response_lengths, rows),
    }
    return replace(batch, **{name: value[index[axis]] for name, axis, value in batch.filled()})


def select_table(part: int, rounds: int | None) -> Iterator[Row]:
    draw = torch.Generator().manual_seed(0)
    count = 2048 // part
    batch = with_rewards(torch.randint(400, 829, (count,), generator=draw), group_size=1)
    drawn = {name: torch.randn(len(batch.response_ids), generator=draw) for name in ("old_log_probs", "advantages")}
    batch = replace(batch, **drawn)  # with ids, mask, rewards and values six fields of response tokens
    order = torch.randperm(count, generator=draw)
    for parts in (2, min(64, count)):
        cut = order.chunk(parts)
        sides = {
            "ours": lambda cut=cut: [batch.select(rows) for rows in cut],
            "index": lambda cut=cut: [with_an_index(batch, rows) for rows in cut],
        }
        for ours, other in zip(*(side() for side in sides.values()), strict=True):
            assert all(torch.equal(value, vars(other)[name]) for name, _, value in ours.filled())
        yield row(f"select, {count:,} rows of about 614 tokens in {parts} parts", in_turn(sides, rounds or 9))


TABLES = {
    "ranks": ranks_table,
    "micro-batches": micro_batches_table,
    "trees": trees_table,
    "attention": attention_table,
    "gae": gae_table,
    "select": select_table,
}


def main() -> None:
    parser = arguments(__doc__, part=64, rounds=1)
    parser.add_argument("--only", choices=TABLES, nargs="+", default=list(TABLES), help="only these")
    parser.add_argument("--part", type=int, default=1, metavar="N", help="an Nth of the rows")
    parser.add_argument("--rounds", type=int, help="by default 5 to 21")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    report([row for name in chosen.only for row in TABLES[name](chosen.part, chosen.rounds)], chosen.json)


if __name__ == "__main__":
    main()
