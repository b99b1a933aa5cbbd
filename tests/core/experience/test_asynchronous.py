"""Experience that outlives a step: what it trains on and waits for, in virtual time."""

import asyncio
import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.simulate import Cluster, Mode, Work, simulate

from hybridrl.core.cluster import WorkerDied
from hybridrl.core.experience.asynchronous import QUEUED, AsynchronousExperience
from hybridrl.core.experience.batching import GroupFilter, NoSignal
from hybridrl.core.experience.collector import Collected, NothingToLearnFrom
from hybridrl.core.experience.responses import ResponseStore
from hybridrl.core.experience.trajectory import Episode, Sampler
from hybridrl.core.rollout import Completion, Request, RolloutClient
from hybridrl.required import required
from hybridrl.rewards.score import FaultGuard, Score
from tests.core.experience.virtual import PER_TOKEN, Lengths, build, train


def collect(experience: AsynchronousExperience, steps: int, first: int = 1) -> list[Collected]:
    return [experience.collect(step) for step in range(first, first + steps)]


def positions(collected: Collected) -> list[int]:
    return sorted(set(collected.batch.position.tolist()))


def now(experience: AsynchronousExperience) -> float:
    return required(experience.thread).loop.time()


class Scripted:
    """A wrapper of the client that answers the first sample of each group with four tokens."""

    def __init__(self, client: Sampler) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def generate(self, request: Request, begun: Completion | None = None) -> asyncio.Future[Completion]:
        if request.sample:
            return self.client.generate(request, begun)
        future = asyncio.get_running_loop().create_future()
        future.set_result(Completion(np.full(4, 7), np.zeros(4, np.float32), False, 0))
        return future


@pytest.mark.parametrize("fixed", [0, 1])
def test_a_sampler_from_outside_answers_some_requests_and_the_engines_the_others(fixed):
    experience = build(Lengths({(0, 1): 9}), samples=2, most=4, fixed=fixed)
    experience.runner.client = Scripted(experience.runner.client)
    steps = collect(experience, 2)
    experience.close()
    for episode in (sample for step in steps for sample in step.samples):
        expected = 4 if episode.sample == 0 else 9 if episode.position == 0 else 2
        assert episode.sampled_tokens == expected


def test_a_step_does_not_wait_for_a_slow_response_which_the_next_ones_continue_and_says_how_old_it_is():
    experience = build(Lengths({(0, 0): 7}), most=4)
    steps = collect(experience, 3)
    experience.close()
    assert [positions(step) for step in steps] == [[1, 2], [3, 4], [0, 5]]
    assert steps[2].batch.staleness[:7].tolist() == [2, 2, 1, 1, 0, 0, 0], (
        "two tokens of each version while it was continued, three at last"
    )
    metrics, place = [one.metrics for one in steps], "training/off_policy/trajectory"
    assert metrics[0][f"{place}_staleness_worst/max"] == 0 and metrics[2][f"{place}_staleness_worst/max"] == 2
    assert metrics[2][f"{place}_staleness/max"] == metrics[2][f"{place}_staleness/min"] == 0
    assert metrics[2][f"{place}_spans/max"] == 3 and metrics[2]["partial/continued_share"] == 0.5
    assert [one["partial/reprefill_tokens"] for one in metrics] == [0, 2 + 2, 2 + 4]


def test_a_step_waits_for_a_group_that_would_be_too_old_in_the_next():
    experience = build(Lengths({(0, 0): 100}), bound=1)
    steps = collect(experience, 2)
    assert positions(steps[1])[0] == 0
    assert now(experience) == 100
    experience.close()


def test_with_a_bound_of_zero_a_step_has_the_prompts_of_the_synchronous_loop():
    experience = build(Lengths({(0, 0): 9, (3, 0): 5}), bound=0)
    steps = collect(experience, 3)
    experience.close()
    assert [positions(step) for step in steps] == [[0, 1], [2, 3], [4, 5]]
    assert all(not required(step.batch.staleness).any() for step in steps)


def test_only_as_many_groups_start_early_as_the_engines_can_work_on():
    experience = build(Lengths(), bound=8, batch=4, slots=4)
    experience.collect(1)
    assert experience.position <= 4 + 5 + 1
    experience.close()


def test_the_last_steps_have_what_is_left():
    experience = build(Lengths({(4, 0): 50}), batch=2, prompts=5)
    seen = []
    while not experience.finished:
        seen += positions(experience.collect(len(seen) + 1))
    experience.close()
    assert sorted(seen) == [0, 1, 2, 3, 4]


def test_groups_without_signal_are_replaced():
    """The score is whether the length is odd: with two samples a group has a signal if one of them is."""
    lengths = Lengths({(position, 0): 3 for position in range(0, 40, 2)})
    experience = build(lengths, samples=2, group_filter=GroupFilter("score", 0))
    steps = collect(experience, 3)
    experience.close()
    trained = [position for step in steps for position in positions(step)]
    assert len(trained) == 6 and all(position % 2 == 0 for position in trained)


def test_a_run_in_which_no_group_has_a_signal_ends():
    experience = build(Lengths(), samples=2, group_filter=GroupFilter("score", 3))
    with pytest.raises(NoSignal, match="of 6 groups of one step were equal"):
        experience.collect(1)


def test_an_error_ends_everything_that_is_in_flight():
    experience = build(Lengths())
    experience.guard = FaultGuard("exclude", 1.0, 99)
    experience.runner.scorers.score = lambda requests, scored: 1 / 0
    with pytest.raises(ZeroDivisionError):
        experience.collect(1)
    assert not required(experience.thread).thread.is_alive()


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_cluster_that_is_lost_while_responses_are_interrupted_is_what_a_step_raises(overlaps, caplog):
    """Not the cancellation of what waits for the engines, at the end of a step or before the next one."""
    experience = build(Lengths({(0, 0): 100}), most=4, overlaps=overlaps)
    client = experience.runner.client
    assert isinstance(client, RolloutClient)
    engine = client.lanes[0].actor
    if overlaps:
        experience.collect(1)
    engine.interrupt = lambda: None

    def lost() -> None:
        raise WorkerDied("Ray's raylet ended")

    if not overlaps:  # once the step has its groups
        interrupt = client.interrupt

        async def interrupted() -> None:
            engine.take = asyncio.Event().wait
            client.check_cluster = lost
            await interrupt()

        client.interrupt = interrupted
    else:
        client.check_cluster = lost
    with pytest.raises(WorkerDied, match="Ray's raylet ended"):
        experience.collect(2 if overlaps else 1)
    del experience
    gc.collect()
    assert not caplog.records, "an error that nobody has retrieved is logged with its traceback"


def test_a_step_in_which_nothing_could_be_scored_says_why():
    experience = build(Lengths(), bound=0)
    fault = Score(None, fault="timeout", detail="no score within 60 s")
    experience.runner.scorers.score = lambda requests, scored: [scored(at, fault) for at in range(len(requests))]
    with pytest.raises(NothingToLearnFrom, match="no score within 60 s"):
        experience.collect(1)
    experience.close()


def test_a_reward_model_scores_the_groups_of_a_step_and_the_others_keep_what_functions_gave():
    experience, sizes = build(Lengths({(0, 1): 9}), samples=2), []

    def rate(episodes: list[Episode]) -> list[Episode]:
        sizes.append(len(episodes))
        return [replace(one, score=Score(0.5 + one.position, {})) for one in episodes]

    experience.rate = rate
    none = Score(None, fault="none", detail="returned None")
    experience.guard.on_error = "stop"
    experience.runner.scorers.score = lambda requests, scored: [scored(at, none) for at in range(len(requests))]
    for collected in collect(experience, 3):
        assert required(collected.batch.rewards).tolist() == [0.5 + at for at in collected.batch.position.tolist()]
    waiting = [one.score.fault for episodes in experience.complete.values() for one in episodes]
    assert {*sizes} == {len(required(collected.batch.rewards))} and {*waiting} <= {"none"}
    experience.close()


def resumed(experience: AsynchronousExperience, again: AsynchronousExperience) -> AsynchronousExperience:
    state = experience.state_dict()
    experience.close()
    again.load_state_dict(state)
    return again


def test_a_resumed_run_continues_what_was_in_flight():
    lengths = Lengths({(0, 0): 7, (3, 1): 3}, short=2)
    whole = build(lengths, samples=2)
    expected = collect(whole, 4)
    whole.close()
    first = build(lengths, samples=2)
    before = collect(first, 2)
    second = resumed(first, build(lengths, samples=2))
    after = collect(second, 2, first=3)
    second.close()
    for one, other in zip(expected, before + after, strict=True):
        assert positions(one) == positions(other)
        for name in ("response_ids", "staleness", "rewards", "rollout_log_probs"):
            assert (vars(one.batch)[name] == vars(other.batch)[name]).all()


class Killed(Exception):
    """The process ends here."""


def spooling(directory, lengths: Lengths, **options) -> tuple[AsynchronousExperience, list[tuple]]:
    """A process of a run with a spool, and the responses that it requests from its engine."""
    experience = build(
        lengths, samples=2, store=ResponseStore(directory / "spool", "engine", "reward", carries=True), **options
    )
    requested, generate = [], experience.runner.client.generate

    def recorded(request, begun=None):
        requested.append(request.key)
        return generate(request, begun)

    experience.runner.client.generate = recorded
    return experience, requested


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_kill_within_a_step_does_not_cost_what_was_finished_in_it(tmp_path, overlaps, count):
    lengths = Lengths({(p, s): 1 + 3 * p + s for p in range(4) for s in range(2)})
    options = {"bound": 0, "overlaps": overlaps}
    killed, _ = spooling(tmp_path, lengths, **options)
    killed.collect(1)
    checkpoint, score_all = killed.state_dict(), killed.runner.scorers.score
    asked: list = []

    def score(requests, scored):
        asked.extend(requests)
        if len(asked) > count:
            raise Killed
        score_all(requests, scored)

    killed.runner.scorers.score = score
    with pytest.raises(Killed):
        killed.collect(2)
    resumed, requested = spooling(tmp_path, lengths, **options)
    resumed.load_state_dict(checkpoint)
    assert positions(resumed.collect(2)) == [2, 3]
    resumed.close()
    assert len(requested) == 4 - count


def test_what_the_spool_has_of_groups_that_are_not_trained_yet_is_in_the_next_checkpoint(tmp_path):
    lengths = Lengths({(0, 0): 50})
    killed, _ = spooling(tmp_path, lengths, most=4)
    assert positions(killed.collect(1)) == [1, 2]
    killed.close()
    resumed, requested = spooling(tmp_path, lengths, most=4)
    assert positions(resumed.collect(1)) == [1, 2]
    assert [0, 1, 0] in [place for place, _ in resumed.state_dict()["carried_scores"]]
    assert (0, 0, 0) in requested and (0, 1, 0) not in requested
    resumed.close()


def test_after_other_weights_the_spool_is_not_used(tmp_path):
    killed, _ = spooling(tmp_path, Lengths(), bound=0)
    killed.collect(1)
    killed.close()
    resumed, requested = spooling(tmp_path, Lengths(), bound=0)
    resumed.store.engine = "other"
    resumed.collect(1)
    resumed.close()
    assert len(requested) == 4


@pytest.mark.parametrize("overlaps", [False, True], ids=["between steps", "while steps train too"])
@settings(max_examples=60, deadline=None)
@given(
    bound=st.integers(0, 3),
    batch=st.integers(1, 4),
    slots=st.integers(1, 12),
    samples=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
    deaths=st.frozensets(st.integers(1, 40), max_size=3),
    stop=st.integers(1, 6),
    training=st.integers(1, 30),
)
def test_whatever_is_slow_dies_or_is_resumed_every_group_is_trained_once_and_in_time(
    overlaps, bound, batch, slots, samples, seed, deaths, stop, training
):
    lengths = np.random.default_rng(seed).geometric(0.1, size=(200, samples))
    known = Lengths({(p, s): int(lengths[p, s]) for p in range(200) for s in range(samples)})
    options = {"bound": bound, "batch": batch, "slots": slots, "samples": samples, "overlaps": overlaps}
    experience, trained = build(known, deaths=deaths, **options), []
    for step in range(1, 8):
        collected = experience.collect(step)
        assert int(required(collected.batch.staleness).max()) <= bound
        assert collected.batch.response_lengths.tolist() == [
            lengths[p, s]
            for p, s in zip(collected.batch.position.tolist(), collected.batch.sample.tolist(), strict=True)
        ]
        assert len(positions(collected)) == batch
        trained += positions(collected)
        if overlaps:
            train(experience, training)
        if step == stop:
            experience = resumed(experience, build(known, **options))
    if overlaps:
        experience.pause()
    experience.close()
    assert len(set(trained)) == len(trained)
    assert set(trained) | experience.in_flight.keys() == set(range(experience.position))


def test_engines_of_their_own_continue_while_a_step_trains_and_their_tokens_keep_their_version():
    experience = build(Lengths({(0, 0): 9, (1, 0): 9, (2, 0): 9}), bound=1, batch=1, overlaps=True)
    first = experience.collect(1)
    assert (positions(first), now(experience)) == ([0], 9), "the next group began with it, and ended too"
    train(experience, 4)
    assert positions(experience.collect(2)) == [1]
    assert now(experience) == 13, "a step whose groups are complete waits for nothing"
    train(experience, 3)
    third = experience.collect(3)
    assert positions(third) == [2] and now(experience) == 13 + 9
    assert required(third.batch.staleness).tolist() == [1] * 3 + [0] * 6, (
        "it began with the second step, which took 3 s"
    )
    experience.close()


def test_with_a_bound_of_zero_nothing_starts_while_a_step_trains():
    experience = build(Lengths(short=3), bound=0, batch=2, overlaps=True)
    experience.collect(1)
    train(experience, 10)
    assert experience.in_flight == {}
    assert not required(experience.collect(2).batch.staleness).any() and now(experience) == 16
    experience.close()


def test_what_fails_while_a_step_trains_is_raised_by_the_next_one():
    experience = build(Lengths({(1, 0): 8}), bound=1, batch=1, overlaps=True)
    experience.collect(1)
    experience.runner.scorers.score = lambda requests, scored: 1 / 0
    train(experience, 10)
    with pytest.raises(ZeroDivisionError):
        experience.collect(2)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("sigma", "share"), [(0.5, 0.25), (0.8, 1.0), (1.2, 0.25)])
def test_the_time_of_a_run_is_that_of_the_law(sigma, share, overlaps):
    """`slots` is a share of a step's 64 responses; the law is that of the simulation which users predict with. With
    devices of its own the rollout continues while a step trains for 600 s, on as many others."""
    batch, steps, warm = 64, 24, 6
    slots = int(batch * share)
    lengths = np.clip(np.random.default_rng(1).lognormal(np.log(200), sigma, size=4000).astype(int), 1, 1600)
    known = Lengths({(p, 0): int(lengths[p]) for p in range(4000)})
    experience = build(known, bound=4, batch=batch, most=2 * batch, slots=slots, overlaps=overlaps)
    training = 600 if overlaps else 0
    times = []
    for step in range(1, steps + 1):
        experience.collect(step)
        train(experience, training)
        times.append(now(experience))
    experience.close()
    measured = (times[-1] - times[warm - 1]) / (steps - warm)
    work = Work(batch, lengths[:, None], steps=steps, warmup=warm)
    cluster = Cluster(1 + overlaps, slots, ((1, PER_TOKEN),), train=training / 2)  # the seconds on all devices
    law = simulate(work, cluster, Mode("law", 4, over_sampling=1.0, training_engines=int(overlaps), queued=QUEUED))
    assert measured == pytest.approx(law.seconds, rel=0.1)
