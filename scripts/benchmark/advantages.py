"""Time of the vectorised advantages compared with a plain loop: `python scripts/benchmark/advantages.py`

The loops are those of a first implementation: GAE iterates over the time steps of padded rows, GRPO over the rows with
a dict of groups. Both get the same numbers and must give the same results before they are timed in turn.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from side_by_side import Arguments
from torch import Tensor

from hybridrl.core.algorithms.estimators import gae, grpo
from hybridrl.core.batch import Batch
from hybridrl.required import required

TOLERANCE = 1e-5
GAE = {"gamma": 1.0, "lam": 0.95}


def rows(lengths: Tensor, group_size: int) -> Batch:
    """Return rows with random rewards and values, whose tokens were all written by the policy."""
    count, tokens = len(lengths), int(lengths.sum())
    numbers = torch.arange(count)
    return Batch(
        prompt_lengths=torch.ones(count, dtype=torch.int64),
        response_lengths=lengths,
        prompt_ids=torch.zeros(count, dtype=torch.int64),
        response_ids=torch.zeros(tokens, dtype=torch.int64),
        group=numbers // group_size,
        position=numbers // group_size,
        sample=numbers % group_size,
        response_mask=torch.ones(tokens, dtype=torch.bool),
        token_rewards=torch.randn(tokens),
        values=torch.randn(tokens),
    )


def gae_loop(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return GAE from tensors [B, T]; the mask is 1 for tokens that the policy wrote."""
    following = running = torch.zeros(len(rewards))
    backwards = []
    for step in reversed(range(rewards.shape[1])):
        written = mask[:, step]
        residual = rewards[:, step] + GAE["gamma"] * following - values[:, step]
        running = torch.where(written, residual + GAE["gamma"] * GAE["lam"] * running, running)
        following = torch.where(written, values[:, step], following)
        backwards.append(running)
    advantages = torch.stack(backwards[::-1], dim=1)
    variance, mean = torch.var_mean(advantages[mask])
    return (advantages - mean) * (variance + 1e-8).rsqrt() * mask


def grpo_loop(rewards: Tensor, group: list[int], mask: Tensor) -> Tensor:
    """Return GRPO's advantages from rewards and mask [B, T]."""
    scores = rewards.sum(dim=1)
    members = defaultdict(list)
    for row, number in enumerate(group):
        members[number].append(scores[row])
    means = {number: torch.stack(scores_of_group).mean() for number, scores_of_group in members.items()}
    deviations = {number: torch.stack(scores_of_group).std() for number, scores_of_group in members.items()}
    for row, number in enumerate(group):
        scores[row] = (scores[row] - means[number]) / (deviations[number] + 1e-6)
    return scores[:, None] * mask


def compare(name: str, batch: Batch, ours: Callable[[], Tensor], loop: Callable[[], Tensor], rounds: int) -> None:
    """Exit if the two differ; otherwise print the time of each."""
    difference = float((batch.padded(ours()) - loop()).abs().max())
    if difference > TOLERANCE:
        raise SystemExit(f"{name}: the two differ by {difference:.1e}")
    taken = [(milliseconds(ours), milliseconds(loop)) for _ in range(rounds)]
    for label, times in zip(("vectorised", "plain loop"), zip(*taken, strict=True), strict=True):
        print(f"{name:28} {label}  median {statistics.median(times):7.1f} ms  least {min(times):7.1f} ms")


def milliseconds(function: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    parser = Arguments(__doc__, rows=16, tokens=32, samples=64, rounds=1)
    parser.add_argument("--rows", type=int, default=1024, help="of GAE")
    parser.add_argument("--tokens", type=int, default=2048, help="of each of these rows")
    parser.add_argument("--samples", type=int, default=8192, help="of GRPO, of 1 to 512 tokens")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; {options.rounds} rounds in turn")

    batch = rows(torch.full((options.rows,), options.tokens), group_size=1)
    rewards, values = (batch.padded(required(field)) for field in (batch.token_rewards, batch.values))
    mask = batch.padded(required(batch.response_mask), fill=False)
    compare(
        f"GAE [{options.rows}, {options.tokens}]",
        batch,
        lambda: gae(batch, **GAE)[0],
        lambda: gae_loop(rewards, values, mask),
        options.rounds,
    )

    samples = rows(torch.randint(1, 513, (options.samples,)), group_size=8)
    rewards, group = samples.padded(samples.token_rewards), samples.group.tolist()
    written = samples.padded(samples.response_mask, fill=False)
    compare(
        f"GRPO {options.samples} samples, 1-512",
        samples,
        lambda: grpo(samples, norm_adv_by_std_in_grpo=True)[0],
        lambda: grpo_loop(rewards, group, written),
        options.rounds,
    )


if __name__ == "__main__":
    main()
