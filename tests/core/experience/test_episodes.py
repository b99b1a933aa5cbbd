"""An episode as rows of a batch, how it is scored, and that it counts once whatever the number of its rows."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.agents.environments import CallRecord, ToolCall
from hybridrl.agents.environments.conversations import conversation_metrics, transcript
from hybridrl.core.algorithms import Algorithm
from hybridrl.core.algorithms.estimators import gae, grpo
from hybridrl.core.algorithms.objective import Divisors, token_weights
from hybridrl.core.carried import Encoded
from hybridrl.core.experience.batching import group_by_prompt, to_batch
from hybridrl.core.experience.episodes import EpisodeRunner
from hybridrl.core.experience.trajectory import Episode, EpisodeRequest, Trajectory, Turn
from hybridrl.core.rollout import Completion, Sampling
from hybridrl.data.prompts import Prompt
from hybridrl.required import required
from hybridrl.rewards.score import Score

PROMPT = Prompt(0, [1, 2], "?", "maths", "42", {})
PLACE = EpisodeRequest(PROMPT, 0, 0, 0, "key", Sampling(8, (0,)))


def turn(observed: list[int], sampled: list[int], stop: str = "stop") -> Turn:
    log_probs = -np.arange(1, len(sampled) + 1, dtype=np.float32)
    return Turn(observed, np.array(sampled), log_probs, 0, stop)


def test_a_completion_is_a_turn():
    completion = Completion(np.array([7, 8]), np.array([-0.5, -0.25], dtype=np.float32), True, 3)
    of_completion = Turn.of(Encoded([1, 2]), completion)
    assert of_completion == Turn([1, 2], completion.token_ids, completion.log_probs, 3, "length")


def test_an_episode_of_several_turns_is_one_row_in_which_only_sampled_tokens_count():
    turns = [turn([1, 2], [7, 8]), turn([3, 4, 5], [9]), turn([6], [10, 11], "length")]
    episode = Episode(PROMPT, 0, 0, Trajectory(turns, "max_tokens"), "", Score(1.0))
    assert (episode.truncated, episode.sampled_tokens) == (True, 5)
    batch = to_batch([[episode]])
    assert batch.prompt_ids.tolist() == [1, 2]
    assert batch.response_ids.tolist() == [7, 8, 3, 4, 5, 9, 6, 10, 11]
    assert required(batch.rollout_log_probs).tolist() == [-1, -2, 0, 0, 0, -1, 0, -1, -2]
    assert required(batch.response_mask).tolist() == [True, True, False, False, False, True, False, True, True]
    assert required(batch.truncated).tolist() == [True]
    assert torch.equal(batch.rewards, torch.tensor([1.0]))


def test_a_row_has_the_experts_that_the_last_turn_was_computed_with():
    first, second, fresh = (np.full((tokens, 2, 3), number, np.int16) for number, tokens in ((1, 3), (2, 7), (3, 2)))
    turns = [
        replace(turn([1, 2], [7, 8]), carried={"routes": first}),
        replace(turn([3, 4], [9, 10]), carried={"routes": second}),
        replace(turn([5], [11, 12]), carried={"routes": fresh}, fresh=True),
    ]
    batch = to_batch([[episode(turns, 1.0), episode([turn([1, 2], [7])], 0.0, 1)]])
    routes = batch.carried["routes"]
    assert routes.shape == (8 + 3 + 3, 2, 3) and routes.dtype == torch.int16
    assert routes[:, 1, 2].tolist() == [2] * 7 + [-1] + [3, 3, -1] + [-1] * 3  # the last: a response without any
    assert to_batch([[episode([turn([1, 2], [7])], 0.0)]]).carried == {}


def joined_at_once(turns: list[Turn]) -> dict[str, np.ndarray]:
    """The columns of a row, made in one pass over its turns."""
    columns = {name: [] for name in ("response_ids", "log_probs", "mask", "rewards", "versions")}
    version = 0
    for at, step in enumerate(turns):
        read = [*step.observed] if at else []
        wrote, versions = len(step.sampled), np.broadcast_to(step.versions, len(step.sampled)).tolist()
        columns["response_ids"] += [*read, *step.sampled.tolist()]
        columns["log_probs"] += [*([0.0] * len(read)), *step.log_probs.tolist()]
        columns["mask"] += [*([False] * len(read)), *([True] * wrote)]
        columns["rewards"] += [*([0.0] * (len(read) + wrote - 1)), step.reward or 0.0]
        columns["versions"] += [*([version] * len(read)), *versions]
        version = versions[-1]
    types = {"response_ids": np.int64, "log_probs": np.float32, "mask": bool, "rewards": np.float32}
    return {name: np.array(values, types.get(name, np.int64)) for name, values in columns.items()}


@st.composite
def turns_of_an_episode(draw) -> list[Turn]:
    turns = []
    for _ in range(draw(st.integers(1, 3))):
        observed = draw(st.lists(st.integers(0, 9), min_size=not turns, max_size=3))
        count = draw(st.integers(1, 4))
        sampled = np.array(draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)))
        log_probs = -np.arange(count, dtype=np.float32) / 3
        versions = draw(st.integers(0, 3) | st.just(np.arange(count)))
        turns.append(
            Turn(observed, sampled, log_probs, versions, "stop", reward=draw(st.sampled_from([None, 0.1, 1.0])))
        )
    return turns


@given(st.lists(turns_of_an_episode(), min_size=1, max_size=4))
def test_the_columns_of_rows_and_of_their_batch_are_those_of_their_turns_joined_at_once(episodes):
    rows = [Trajectory(turns).rows()[0] for turns in episodes]
    expected = [joined_at_once(turns) for turns in episodes]
    for row, columns in zip(rows, expected, strict=True):
        for name, column in columns.items():
            value = getattr(row, name)
            assert value.dtype == column.dtype and (value == column).all(), name
    batch = to_batch([[episode(turns, 1.0, at) for at, turns in enumerate(episodes)]], version=5)
    whole = {name: np.concatenate([columns[name] for columns in expected]) for name in expected[0]}
    assert batch.prompt_ids.tolist() == [token for turns in episodes for token in turns[0].observed]
    assert batch.response_lengths.tolist() == [len(columns["mask"]) for columns in expected]
    for name, field in {"response_ids": "response_ids", "log_probs": "rollout_log_probs", "mask": "sampled"}.items():
        assert vars(batch)[field].tolist() == whole[name].tolist(), name
    assert (5 - required(batch.staleness)).tolist() == whole["versions"].tolist()
    assert torch.equal(required(batch.response_mask), required(batch.sampled))


def episode(turns: list[Turn], score: float, sample: int = 0) -> Episode:
    return Episode(PROMPT, 0, sample, Trajectory(turns), "", Score(score))


def split_and_whole() -> tuple[list[Episode], list[Episode]]:
    """Two episodes of a group, the first as two rows, and the same tokens as one row each."""
    first, second, other = turn([1, 2], [7, 8, 9]), turn([3], [10]), turn([1, 2], [11, 12])
    in_two, in_one = [first, replace(second, fresh=True)], [turn([1, 2], [7, 8, 9, 10])]
    return [episode(in_two, 1.0), episode([other], 0.0, 1)], [episode(in_one, 1.0), episode([other], 0.0, 1)]


def test_a_replaced_context_makes_a_further_row_of_the_same_episode():
    batch = to_batch([[replace(one, position=4) for one in split_and_whole()[0]]])
    assert required(batch.episode).tolist() == [0, 0, 1]
    assert batch.prompt_ids.tolist() == [1, 2, 3, 1, 2]
    assert batch.response_lengths.tolist() == [3, 1, 2]
    assert (required(batch.rewards).tolist(), batch.sample.tolist()) == ([1, 1, 0], [0, 0, 1])
    assert batch.position.tolist() == [4] * 3
    whole = batch.by_episode()
    assert (whole.response_lengths.tolist(), whole.prompt_ids.tolist()) == ([4, 2], [1, 2, 1, 2])


def test_an_episode_that_ended_before_its_first_response_is_in_no_group_even_if_it_counts_as_0():
    died = Episode(PROMPT, 0, 2, Trajectory([], "fault", fault="died"), "", Score(0.0, fault="died"))
    batch = to_batch(group_by_prompt([*split_and_whole()[0], died]))
    assert required(batch.episode).tolist() == [0, 0, 1]  # three rows, which are not one for each of three episodes
    assert group_by_prompt([died]) == []


def test_the_baseline_is_over_episodes_and_not_over_rows():
    advantages = []
    for episodes in split_and_whole():
        estimator = Algorithm(lambda batch: grpo(batch, norm_adv_by_std_in_grpo=True))
        advantages.append(estimator.advantages(to_batch([episodes]))[0].advantages)
    assert torch.equal(*advantages)
    assert required(advantages[0]).tolist() == pytest.approx(
        [0.5 / (0.5**0.5 + 1e-6)] * 4 + [-0.5 / (0.5**0.5 + 1e-6)] * 2
    )


def test_rewards_to_come_pass_from_row_to_row_of_an_episode():
    returns = []
    for episodes in split_and_whole():
        batch = to_batch([episodes])
        batch = replace(batch, values=torch.linspace(0, 1, len(batch.response_ids)))
        estimator = Algorithm(lambda batch: gae(batch, gamma=0.9, lam=0.8))
        returns.append(estimator.advantages(batch)[0].returns)
    assert torch.equal(*returns)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_an_episode_weighs_the_same_in_the_loss_as_one_row_and_as_two(mode):
    split, whole = (to_batch([episodes]) for episodes in split_and_whole())
    totals = Divisors.of(split)
    assert totals == Divisors.of(whole) == Divisors(6, 2)
    split = replace(split, episode_tokens=torch.tensor([4.0, 4.0, 2.0]))
    weights = [token_weights(batch, mode, totals, 8.0) for batch in (split, whole)]
    assert torch.equal(*weights)


class Scorers:
    """A reward function that gives 0.25 to everything; keeps what it was asked."""

    per = "response"

    def __init__(self) -> None:
        self.asked = []

    def score(self, requests, scored):
        self.asked += requests
        for index in range(len(requests)):
            scored(index, Score(0.25, {"acc": 0.25}))


class Source:
    """Episodes that have ended."""

    def __init__(self, *trajectories: Trajectory) -> None:
        self.trajectories = trajectories

    async def finished(self):
        yield [(index, trajectory, None) for index, trajectory in enumerate(self.trajectories)]

    def scoring_started(self, episodes):
        return lambda index, score: None


def score(trajectory: Trajectory, **options: bool) -> tuple[Episode, Scorers]:
    scorers = Scorers()
    runner = EpisodeRunner(None, scorers, 1, **options)
    episodes, _ = asyncio.run(runner.score_finished(Source(trajectory), [PLACE]))
    return episodes[0], scorers


class SlowScorers(Scorers):
    """A reward function whose scores come from another thread, after a while."""

    def score(self, requests, scored):
        for index in range(len(requests)):
            threading.Timer(0.05, scored, [index, Score(0.25)]).start()


class TwoBatches(Source):
    """Episodes that end one after another; what was reported before the second ends is kept."""

    def __init__(self, reported: list) -> None:
        self.reported, self.before_the_second = reported, []

    async def finished(self):
        yield [(1, Trajectory([turn([1], [7])]), None)]
        await asyncio.sleep(0.3)
        self.before_the_second += self.reported
        yield [(0, Trajectory([turn([1], [8])]), None)]


def test_an_episode_is_reported_once_it_has_its_score_while_others_are_sampled():
    reported: list[int] = []
    source = TwoBatches(reported)
    runner = EpisodeRunner(None, SlowScorers(), 1)
    places = [PLACE, replace(PLACE, sample=1)]
    run = runner.score_finished(source, places, lambda episode: reported.append((episode.sample, episode.score.value)))
    episodes, _ = asyncio.run(run)
    assert source.before_the_second == [(1, 0.25)] and reported == [(1, 0.25), (0, 0.25)]
    assert [one.sample for one in episodes] == [0, 1]


def test_what_the_report_of_an_episode_raises_ends_the_call():
    def full(_: Episode) -> None:
        raise OSError("no space left")

    runner = EpisodeRunner(None, Scorers(), 1)
    with pytest.raises(OSError, match="no space left"):
        asyncio.run(runner.score_finished(Source(Trajectory([turn([1], [7])])), [PLACE], full))


def test_an_episode_that_cannot_be_made_ends_the_call():
    class Broken(EpisodeRunner):
        def _episode(self, *_: object) -> Episode:
            raise ValueError("no episode")

    runner = Broken(None, SlowScorers(), 1)
    call = runner.score_finished(Source(Trajectory([turn([1], [7])])), [PLACE], lambda _: None)
    with pytest.raises(ValueError, match="no episode"):
        asyncio.run(asyncio.wait_for(call, 10))


REWARDED = [replace(turn([1, 2], [7, 8]), reward=0.5), replace(turn([3], [9]), reward=1.0)]


@pytest.mark.parametrize(
    ("options", "value", "token_rewards"),
    [
        ({}, 1.5, [0.0, 0.5, 0.0, 1.0]),
        ({"function_scores": True}, 0.25, None),
        ({"function_scores": True, "add_environment_reward": True}, 1.75, [0.0, 0.5, 0.0, 1.25]),
    ],
)
def test_an_environments_rewards_count_unless_a_function_is_given(options, value, token_rewards):
    scored, scorers = score(Trajectory(REWARDED, text="7 8", reward=1.5), **options)
    assert (scored.score.value, scored.score.token_rewards) == (value, token_rewards)
    assert len(scorers.asked) == bool(options)


def test_the_reward_function_reads_the_whole_conversation():
    call = CallRecord(ToolCall("look", {"word": "x"}), "found", 0.1, "ok", 0.75)
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "7"}]
    turns = [replace(turn([1, 2], [7, 8]), calls=[call])]
    _, scorers = score(Trajectory(turns, "completed", messages, text="7", metrics={"won": 1.0}))
    assert scorers.asked[0].solution == "7"
    extra = scorers.asked[0].extra_info
    assert (extra["num_turns"], extra["tool_rewards"], extra["messages"]) == (1, [0.75], messages)
    assert (extra["episode_metrics"], extra["stop"]) == ({"won": 1.0}, "completed")


def test_what_the_policy_wrote_in_the_last_row_is_apart_from_what_it_read():
    turns = [turn([1, 2], [7, 8]), replace(turn([3], [9]), fresh=True), turn([4, 5], [6])]
    _, scorers = score(Trajectory(turns, text="what it wrote and read"))
    assert scorers.asked[0].extra_info["written_ids"] == [[9], [6]]


def test_a_fault_of_the_environment_excludes_the_episode():
    scored, scorers = score(Trajectory([], "fault", text="", fault="died", detail="its process died"))
    assert (scored.score.value, scored.score.fault, scorers.asked) == (None, "died", [])


def test_metrics_of_conversations_are_worked_out_by_hand():
    found = CallRecord(ToolCall("look", {}), "found", 0.5, "ok")
    wrong = [CallRecord(ToolCall(name, {}), "no", 0.1, "invalid") for name in ("lok", "lock")]
    first = [replace(turn([1, 2], [7, 8]), calls=[found, *wrong], seconds_tools=1.0), turn([3, 4, 5], [9])]
    second = [replace(turn([1, 2], [7]), seconds_model=3.0)]
    rolled = [Trajectory(first, "completed", text=""), Trajectory(second, "max_turns", text="", metrics={"won": 1.0})]
    metrics = conversation_metrics([Episode(PROMPT, 0, n, one, "", Score(1.0)) for n, one in enumerate(rolled)])
    assert [metrics[f"num_turns/{kind}"] for kind in ("min", "max", "mean")] == [1, 2, 1.5]
    assert (metrics["episode/observed_tokens/max"], metrics["tokens_per_turn/mean"]) == (3, 4 / 3)
    assert (metrics["stop/completed"], metrics["stop/max_turns"], metrics["environment/won"]) == (0.5, 0.5, 1.0)
    assert (metrics["tools/look/calls"], metrics["tools/unknown/invalid"]) == (1, 2)
    assert metrics["agent_loop/slowest/generate_sequences"] == 3.0
    assert transcript(rolled[0])["turns"][0]["calls"][0]["result"] == "found"
    assert conversation_metrics([episode([turn([1], [2])], 1.0)]) == {}
