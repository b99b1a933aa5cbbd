"""Metrics of episodes with several turns are of what the policy wrote, not of what it read."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from hybridrl.agents.environments.conversations import conversation_metrics
from hybridrl.core.algorithms import Algorithm
from hybridrl.core.algorithms.batch_metrics import batch_metrics
from hybridrl.core.algorithms.estimators import grpo
from hybridrl.core.experience.batching import to_batch
from hybridrl.core.experience.trajectory import Episode, Trajectory, Turn
from hybridrl.data.prompts import Prompt
from hybridrl.doctor.replay import described
from hybridrl.doctor.reward import as_batch
from hybridrl.required import required
from hybridrl.rewards.score import Score
from hybridrl.runs.sample_log import TrainedFields
from hybridrl.tracking.records import SampleRecord

PROMPT = Prompt(0, [1, 2], "?", "maths", "42", {})
ANSWER = [50, 51, 52, 53, 54, 55]  # of the environment, always


def turn(observed: list[int], sampled: list[int]) -> Turn:
    return Turn(observed, np.array(sampled), np.full(len(sampled), -1.0, dtype=np.float32), 0, "stop")


def metrics_of(groups: list[list[Episode]], *, mask_truncated: bool = False) -> dict[str, float]:
    algorithm = Algorithm(lambda batch: grpo(batch, norm_adv_by_std_in_grpo=True))
    return batch_metrics(algorithm.advantages(to_batch(groups, mask_truncated=mask_truncated))[0])


def game(*guesses: list[int], sample: int) -> Episode:
    """A game of several turns in which the environment always answers with the same six tokens."""
    turns = [turn([1, 2] if number == 0 else ANSWER, ids) for number, ids in enumerate(guesses)]
    return Episode(PROMPT, 0, sample, Trajectory(turns, text=""), "", Score(float(sample)))


def test_lengths_and_repetition_are_of_what_the_policy_wrote_in_its_turns():
    short, long = game([7, 9], [8, 9], [7, 9], sample=0), game([7, 7, 7, 7, 7], [7, 7, 7, 7, 9], sample=1)
    metrics = metrics_of([[short, long]])
    spread = {name: metrics[f"response_length/{name}"] for name in ("min", "mean", "max", "p50", "p99")}
    assert spread == {"min": 6.0, "mean": 8.0, "max": 10.0, "p50": 6.0, "p99": 10.0}
    # 7777 twice in a turn; 7777 and 7779 in the next one. Neither the environment's words nor those of other turns.
    assert metrics["response/repeated_ngrams"] == pytest.approx(1 / 4)
    assert (metrics["perf/response_tokens"], metrics["perf/total_num_tokens"]) == (16, 4 + 16 + 18)


def test_a_response_that_is_not_trained_on_has_a_length_too():
    cut = replace(game([7, 9, 9], [8], sample=0).trajectory, stop="max_tokens")
    groups = [[replace(game([1], sample=0), trajectory=cut), game([5, 9], sample=1)]]
    metrics = metrics_of(groups, mask_truncated=True)
    assert (metrics["response_length/max"], metrics["response_length/min"]) == (4.0, 2.0)


def test_the_slowest_episode_has_the_length_that_others_have_too():
    one = game([7, 9], [8, 9], sample=0)
    assert conversation_metrics([one])["agent_loop/slowest/response_length"] == 4.0
    assert conversation_metrics([one])["episode/observed_tokens/mean"] == 6.0


def test_a_sampled_token_is_written_as_sampled_whether_or_not_it_is_trained_on():
    whole = game([7, 9], [8], sample=0)
    cut = replace(whole, trajectory=replace(whole.trajectory, stop="max_tokens"))
    algorithm = Algorithm(lambda batch: grpo(batch, norm_adv_by_std_in_grpo=True))
    batch = algorithm.advantages(to_batch([[cut, game([5], sample=1)]], mask_truncated=True))[0]
    tokens = TrainedFields(batch, 0, 2, lambda ids: [""] * len(ids))["", 0, 0]["tokens"]
    assert tokens["sampled"] == [1, 1, 0, 0, 0, 0, 0, 0, 1]


def test_a_row_of_a_replay_is_described_by_what_the_policy_wrote():
    batch = to_batch([[game([7, 9], [8], sample=0), game([5], sample=1)]])
    batch.advantages = required(batch.rollout_log_probs).clone()
    batch.old_log_probs = torch.where(batch.response_mask, -1.25, -9.0)  # of what it read the trainer's are any
    rows = described(batch, [1.0, 0.5], str)
    assert [row["tokens"] for row in rows] == [3, 1]
    assert [row["least_log_prob"] for row in rows] == [-1.25, -1.25]
    assert [row["largest_gap"] for row in rows] == [0.25, 0.25]


@pytest.mark.parametrize("stop", ["max_tokens", "max_turn_tokens", "context_overflow"])
def test_a_rescored_episode_is_truncated_by_any_limit_of_tokens(stop):
    episode = {"stop": stop, "sampled_tokens": 3, "position": 0}
    batch = as_batch([SampleRecord("?", "7", "7", 1.0, 1, {}, episode)], [1.0])
    assert required(batch.truncated).tolist() == [True]
