"""A policy that is rewarded for length learns the same length whether its rollouts are continued over steps or not, and
a lower one where rollouts that are too old are dropped.

The policy has one parameter, the log-odds that a token is followed by another, so the length is all that it can learn.
The experience is real, its engine needs virtual time.
"""

import asyncio
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil, exp, log, log1p
from statistics import fmean, stdev

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybridrl.core.algorithms.estimators import grpo
from hybridrl.core.algorithms.rollout_correction import RolloutCorrection
from hybridrl.core.batch import Batch
from hybridrl.core.experience.asynchronous import Admission, AsynchronousExperience
from hybridrl.core.rollout import Completion, Request
from hybridrl.required import required
from tests.core.experience.virtual import Scorers, build

SEEDS, STEPS, BATCH, SAMPLES, SLOTS = (0, 1, 2), 30, 8, 4, 1000
FIRST_MEAN, RATE = 20, 0.05


@dataclass
class Policy:
    """Each token is followed by another with a probability that depends on nothing but the weights.

    How much a response survives is drawn once for its place in the run, and each of its tokens uses up as much as the
    weights that sample it make ending likely: with other weights a response that has begun ends earlier or later.
    """

    seed: int
    correction: RolloutCorrection
    logits: list[float] = field(default_factory=lambda: [log(FIRST_MEAN - 1)])  # by version of the weights
    # By place: tokens of earlier weights, what was left after them, and what a token of the last weights used up.
    left: dict[tuple[int, int], tuple[int, float, float]] = field(default_factory=dict)

    @property
    def log_mean(self) -> float:
        return log(1 + exp(self.logits[-1]))

    def of(self, request: Request) -> int:
        place, use = (request.prompt, request.sample), log1p(exp(-self.logits[-1]))
        if place not in self.left:
            self.left[place] = 0, np.random.default_rng((self.seed, *place)).exponential(), use
        counted, left, earlier_use = self.left[place]
        left -= (request.begun - counted) * earlier_use
        self.left[place] = request.begun, left, use
        return request.begun + ceil(left / use)

    def learn(self, batch: Batch) -> None:
        """Make a step of REINFORCE with the advantages of groups; the reward is the length."""
        logit = torch.tensor(self.logits[-1], requires_grad=True)
        log_probs = log_probs_of(batch, logit)
        sampled_with = torch.tensor(self.logits).flip(0)[required(batch.staleness).long()]
        rollout_log_probs, old_log_probs = log_probs_of(batch, sampled_with), log_probs.detach()
        batch, _ = self.correction.apply(
            replace(batch, rollout_log_probs=rollout_log_probs, old_log_probs=old_log_probs)
        )
        rewards = torch.zeros(len(log_probs)).index_add_(0, batch.last_tokens, batch.rewards)
        advantages, _ = grpo(replace(batch, token_rewards=rewards), norm_adv_by_std_in_grpo=True)
        (batch.importance_weights * advantages * log_probs).sum().div(len(batch)).backward()
        self.logits.append(self.logits[-1] + RATE * float(logit.grad))


def log_probs_of(batch: Batch, logits: Tensor) -> Tensor:
    """Return those of the sampled tokens, of which the last of each response ends it."""
    signs = torch.ones(len(batch.response_ids))
    signs[batch.last_tokens] = -1
    return logsigmoid(signs * logits)


class FirstComplete(Admission):
    """A step takes whatever is complete, and waits for nothing else."""

    def _needs(self, version: int) -> list[tuple[set[int], int]]:
        return super()._needs(version)[:1]


class Dropping(AsynchronousExperience):
    """Trains on no older tokens either, but drops a group that is too old, and starts another one instead."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shares = [FirstComplete(share.bound, share.batch, share.most) for share in self.shares]
        self.requested, generate = [], self.runner.client.generate

        def remembered(request: Request, begun: Completion | None = None) -> asyncio.Future[Completion]:
            self.requested.append((request, future := generate(request, begun)))
            return future

        self.runner.client.generate = remembered

    async def _sample(self, version: int):
        (share,) = self.shares
        old = {position for position, start in share.started.items() if start + share.bound < version}
        for position in old:
            self.complete.pop(position, None)
            if position in self.tasks:
                self.tasks.pop(position).cancel()
        for request, future in self.requested:
            if request.prompt in old:
                future.cancel()
        share.end(old)
        return await super()._sample(version)


@cache
def learned(kind: type[AsynchronousExperience], bound: int, level: str) -> list[float]:
    """Return the logarithm of the mean length that each seed has learned, given the level of the importance weights."""
    results = []
    for seed in SEEDS:
        policy = Policy(seed, RolloutCorrection(level, None, 2.0, False, ()))
        settings = {"bound": bound, "batch": BATCH, "samples": SAMPLES, "slots": SLOTS}
        experience = build(policy, kind=kind, scorers=Scorers(float), **settings)
        oldest = 0
        for step in range(1, STEPS + 1):
            batch = experience.collect(step).batch
            oldest = max(oldest, int(required(batch.staleness).max()))
            policy.learn(batch)
        experience.close()
        assert oldest == bound, "otherwise the variants would not differ"
        results.append(policy.log_mean)
    return results


def lost(level: str, kind: type[AsynchronousExperience], bound: int) -> tuple[float, float]:
    """Return by how much less is learned than by synchronous steps, and the standard error of that difference."""
    synchronous, others = learned(AsynchronousExperience, 0, level), learned(kind, bound, level)
    error = ((stdev(synchronous) ** 2 + stdev(others) ** 2) / len(SEEDS)) ** 0.5
    return fmean(synchronous) - fmean(others), error


@pytest.mark.slow
@pytest.mark.parametrize("bound", [2, 4])
def test_rollouts_that_are_continued_teach_the_length_of_synchronous_ones(bound):
    """The weights of whole responses are exact. All variants have the same luck: they differ by less than the seeds."""
    difference, error = lost("sequence", AsynchronousExperience, bound)
    assert abs(difference) < error and abs(difference) < lost("sequence", Dropping, 2)[0] / 10
    assert fmean(learned(AsynchronousExperience, 0, "sequence")) > log(2 * FIRST_MEAN), "there was something to learn"


@pytest.mark.slow
@pytest.mark.parametrize("level", ["sequence", "token"])
def test_dropping_what_is_too_old_teaches_shorter_responses(level):
    difference, error = lost(level, Dropping, 2)
    assert difference > 3 * error and difference > log(1.2)


def test_the_weights_of_single_tokens_lose_less_than_the_noise():
    """They are not exact: a response is as much shorter as the policy has grown since it was sampled, on average by 3%
    in each of 1.3 steps, and by so much less is learned."""
    difference, error = lost("token", AsynchronousExperience, 2)
    assert abs(difference) < error
    assert difference < lost("token", Dropping, 2)[0] / 4
