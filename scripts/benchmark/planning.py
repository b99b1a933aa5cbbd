"""Time of what is computed about a batch rather than by a model: `python scripts/benchmark/planning.py [--only NAME]`

Rows to ranks, rows to passes, attention over the rows of a pass on CPU, GAE, and rows picked out of a batch. Beside
each stands what a first version would have: a loop with a heap, best fit decreasing, attention over a padded rectangle,
a loop over time steps, an index for each token. Both must find the same, where there is one right result, before they
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
from advantages import SETTINGS, gae_loop
from advantages import rows as with_rewards
from side_by_side import Row, Seconds, arguments, in_turn, report, told
from torch import Tensor

from hybridrl.algorithms.estimators.gae import gae
from hybridrl.batch import Batch, spans
from hybridrl.training.attention import attend
from hybridrl.training.packing import Budget, balance, plan

CAP = 16_384


def lengths_drawn(count: int) -> dict[str, np.ndarray]:
    """Lengths of rows by the name of their distribution."""
    draw = np.random.default_rng(0)
    found = {
        "log-normal up to 4,096": np.clip(draw.lognormal(5.7, 1.1, count), 1, 4096),
        "uniform 1..2,048": draw.integers(1, 2049, count),
        "gamma, mean 1,000": np.clip(draw.gamma(4, 250, count), 20, 4096),
    }
    return {name: lengths.astype(np.int64) for name, lengths in found.items()}


def filling(lengths: np.ndarray, room: int) -> np.ndarray:
    """Rows a little longer, so that `room` tokens are missing to full passes."""
    missing = -int(lengths.sum() + room) % CAP
    return lengths + missing // len(lengths) + (np.arange(len(lengths)) < missing % len(lengths))


def row(what: str, times: dict[str, Seconds], note: str = "", other: str = "", bar: str = "") -> Row:
    """A line of two sides, ours first: milliseconds where there is a bar, else the speed-up."""
    (_, ours), (name, theirs) = times.items()
    cells = f"{told(ours, 'ms')}{note}", f"{name} {told(theirs, 'ms')}{other}"
    return Row(what, *cells, 1e3 * ours.median if bar else theirs.median / ours.median, bar)


# -- rows to ranks and passes --------------------------------------------------------------------------------------


def with_a_heap(lengths: list[int], ranks: int) -> list[list[int]]:
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        load, rank = heapq.heappop(loads)
        shares[rank].append(number)
        heapq.heappush(loads, (load + lengths[number], rank))
    return shares


def best_fit(lengths: list[int]) -> list[list[int]]:
    """Longest first, each into the fullest pass that has room for it."""
    spaces: list[tuple[int, int]] = []
    passes: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        place = bisect_left(spaces, (lengths[number], 0))
        if place == len(spaces):
            spaces.append((CAP, len(passes)))
            passes.append([])
        space, chosen = spaces.pop(place)
        passes[chosen].append(number)
        insort(spaces, (space - lengths[number], chosen))
    return passes


def uneven(shares: list[list[int]], lengths: np.ndarray) -> float:
    """The worst rank's tokens over the mean, less 1."""
    return max(int(lengths[share].sum()) for share in shares) * len(shares) / int(lengths.sum()) - 1


def ranks_table() -> Iterator[Row]:
    for name, lengths in lengths_drawn(8192).items():
        listed = lengths.tolist()
        sides = {
            "ours": partial(balance, np.arange(8192), lengths, 64),
            "a heap": partial(with_a_heap, listed, 64),
        }
        notes = [f"; worst over mean 1 + {uneven(side(), lengths):.1e}" for side in sides.values()]
        yield row(
            f"8,192 rows to 64 ranks, {name}", in_turn(sides, 21), *notes, "at most 3 (aim 1) ms, 1 + 1e-3 (aim 1e-4)"
        )


def passes_table() -> Iterator[Row]:
    drawn = lengths_drawn(1024)
    tight = {f"{name}, {room} tokens below full": filling(drawn[name], room) for name in drawn for room in (0, 100)}
    for name, lengths in (drawn | tight).items():
        fewest, listed = -(-int(lengths.sum()) // CAP), lengths.tolist()
        sides = {"ours": partial(plan, lengths, 1, Budget(CAP)), "best fit decreasing": partial(best_fit, listed)}
        ours, other = plan(lengths, 1, Budget(CAP))[0], best_fit(listed)
        if sorted(number for rows in ours for number in rows) != list(range(1024)):
            raise SystemExit(f"{name}: a row is in no pass or in two")
        over = sum(int(lengths[rows].sum()) > CAP for rows in ours)
        notes = f"; {len(ours)} passes, {over} over the cap", f"; {len(other)} passes"
        bar = f"at most 5 (aim 1) ms; {fewest} passes fit the sum: + 1% (aim 0)"
        yield row(f"1,024 rows to passes of 16,384, {name}", in_turn(sides, 21), *notes, bar)


# -- attention -----------------------------------------------------------------------------------------------------


def in_a_rectangle(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
    """All rows padded to the longest; [1, heads, T, width] each."""
    longest = int(lengths.max())
    places = spans(torch.full_like(lengths, longest), torch.arange(len(lengths)))
    places = places.view(-1, longest)[torch.arange(longest) < lengths[:, None]]
    padded = []
    for line in (query, key, value):
        flat = line.new_zeros(len(lengths) * longest, line.shape[1], line.shape[3])
        flat = flat.index_copy(0, places, line[0].transpose(0, 1))
        padded.append(flat.view(len(lengths), longest, *flat.shape[1:]).transpose(1, 2))
    output = F.scaled_dot_product_attention(*padded, is_causal=True, enable_gqa=True)
    return output.transpose(1, 2).flatten(0, 1)[places][None]


def with_repeated_heads(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
    """Row by row, without enable_gqa."""
    shared, outputs = query.shape[1] // key.shape[1], []
    for q, k, v in zip(*(line.split(lengths.tolist(), dim=2) for line in (query, key, value)), strict=True):
        k, v = (tensor.repeat_interleave(shared, dim=1) for tensor in (k, v))
        outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2))
    return torch.cat(outputs, dim=1)


def row_by_row(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
    boundaries = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return attend(torch.nn.Identity(), query, key, value, None, boundaries=boundaries)[0]


def attention_table() -> Iterator[Row]:
    draw = torch.Generator().manual_seed(0)

    def tail(count: int, middle: float, most: int) -> Tensor:
        return (torch.randn(count, generator=draw) * 0.8 + middle).exp().long().clamp(20, most)

    shapes = {
        "quickstart: 256 rows of 45-60, 2 heads": (2, 2, torch.randint(45, 61, (256,), generator=draw)),
        "25M: 128 rows of 80-572, 6 heads (2 of keys)": (6, 2, 60 + tail(128, 5.0, 512)),
        "0.5B: 16 rows up to 2,048, 14 heads (2 of keys)": (14, 2, tail(16, 6.4, 2048)),
    }
    for name, (heads, of_keys, lengths) in shapes.items():
        inputs = [
            torch.randn(1, int(lengths.sum()), count, 64, generator=draw).transpose(1, 2).requires_grad_()
            for count in (heads, of_keys, of_keys)
        ]

        def both_ways(way: Callable[..., Tensor], inputs: list[Tensor], lengths: Tensor) -> list[Tensor]:
            output = way(*inputs, lengths)
            return [output, *torch.autograd.grad(output.square().sum(), inputs)]

        ways = {"ours": row_by_row, "padded": in_a_rectangle, "repeated heads": with_repeated_heads}
        sides = {label: partial(both_ways, way, inputs, lengths) for label, way in ways.items()}
        for found in zip(*(side() for side in sides.values()), strict=True):
            torch.testing.assert_close([found[0]] * 2, [*found[1:]], atol=1e-4, rtol=1e-4)
        times = in_turn(sides, 5)
        repeated = f"; with repeated heads {told(times.pop('repeated heads'), 'ms')}"
        yield row(f"attention and its gradient, {name} of 64", times, repeated)


# -- GAE and picking rows ------------------------------------------------------------------------------------------


def gae_table() -> Iterator[Row]:
    torch.manual_seed(0)
    tail = (torch.randn(1024) * 0.8 + 6).exp().long().clamp(20, 2047)
    tail[0] = 2048
    for name, lengths in (("full rows", torch.full((1024,), 2048)), ("heavy-tailed rows", tail)):
        batch = with_rewards(lengths, group_size=1)
        padded = [batch.padded(field) for field in (batch.token_rewards, batch.values)]
        mask = batch.padded(batch.response_mask, fill=False)
        sides = {"ours": partial(gae, batch, SETTINGS), "time steps": partial(gae_loop, *padded, mask)}
        torch.testing.assert_close(batch.padded(gae(batch, SETTINGS)[0]), gae_loop(*padded, mask), atol=1e-5, rtol=0)
        yield row(f"GAE [1024, 2048], {name}", in_turn(sides, 9), bar="at most 100 (aim 45) ms")


def with_an_index(batch: Batch, rows: Tensor) -> Batch:
    """Rows picked by advanced indexing."""
    index = {
        "row": rows,
        "prompt": spans(batch.prompt_lengths, rows),
        "response": spans(batch.response_lengths, rows),
    }
    return replace(batch, **{name: value[index[axis]] for name, axis, value in batch._filled()})


def select_table() -> Iterator[Row]:
    draw = torch.Generator().manual_seed(0)
    batch = with_rewards(torch.randint(400, 829, (2048,), generator=draw), group_size=1)
    drawn = {name: torch.randn(len(batch.response_ids), generator=draw) for name in ("old_log_probs", "advantages")}
    batch = replace(batch, **drawn)  # with ids, mask, rewards and values six fields of response tokens
    order = torch.randperm(2048, generator=draw)
    for parts in (2, 64):
        cut = order.chunk(parts)
        sides = {
            "ours": lambda cut=cut: [batch.select(rows) for rows in cut],
            "index": lambda cut=cut: [with_an_index(batch, rows) for rows in cut],
        }
        for ours, other in zip(*(side() for side in sides.values()), strict=True):
            assert all(torch.equal(value, vars(other)[name]) for name, _, value in ours._filled())
        yield row(f"select, 2,048 rows of about 614 tokens in {parts} parts", in_turn(sides, 9))


TABLES = {
    "ranks": ranks_table,
    "passes": passes_table,
    "attention": attention_table,
    "gae": gae_table,
    "select": select_table,
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=TABLES, nargs="+", default=list(TABLES), help="these alone")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    report([line for name in chosen.only for line in TABLES[name]()], chosen.json)


if __name__ == "__main__":
    main()
