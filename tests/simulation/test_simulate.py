import heapq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.simulate import Cluster, Mode, Work, best_split, log_normal_lengths, simulate

SYNC = Mode("sync")
SECOND = ((1, 1.0),)  # a second per token, whatever runs


def work(*lengths: float, groups: int = 1, n: int = 1, steps: int, **more) -> Work:
    return Work(groups, np.array(lengths, dtype=float).reshape(-1, n), steps=steps, warmup=0, **more)


def test_a_synchronous_step_lasts_as_long_as_its_longest_response_and_what_follows():
    cluster = Cluster(slots=2, speed=SECOND, train=2, sync=1, switch=0.5)
    predicted = simulate(work(1, 3, groups=2, steps=2), cluster, SYNC)
    assert predicted.seconds == 3 + 2 + 1 + 0.5
    assert predicted.samples_per_second == 2 / 6.5
    assert predicted.rollout_busy == 4 / 6
    assert predicted.training_busy == 2 / 6.5
    assert (predicted.staleness, predicted.reprefill_tokens) == (0, 0)


def test_responses_wait_for_a_free_slot_in_their_order():
    # 3 and 1 start; 2 starts at 1 and 4 at 3, until 7
    assert simulate(work(3, 1, 2, 4, groups=4, steps=1), Cluster(slots=2, speed=SECOND), SYNC).seconds == 7
    assert simulate(work(3, 1, 2, 4, groups=4, steps=1), Cluster(engines=2, slots=1, speed=SECOND), SYNC).seconds == 7


def test_a_group_is_complete_with_its_last_response():
    lengths = work(1, 5, 2, 2, n=2, steps=1)
    assert simulate(lengths, Cluster(slots=4, speed=SECOND), SYNC).seconds == 5
    assert simulate(lengths, Cluster(slots=4, speed=SECOND), Mode("over", None, over_sampling=1)).seconds == 2


def test_speed_depends_on_how_many_responses_run():
    # 2 tokens of both at 1.5 s, and 2 of the longer one at 1 s
    cluster = Cluster(slots=2, speed=((1, 1.0), (3, 2.0)))
    assert simulate(work(2, 4, groups=2, steps=1), cluster, SYNC).seconds == 5


def test_an_engine_decodes_nothing_while_it_prefills():
    cluster = Cluster(slots=2, speed=SECOND, prefill_rate=10)
    assert simulate(work(2, 4, groups=2, steps=1, prompt_tokens=10), cluster, SYNC).seconds == 1 + 1 + 4


def test_an_open_response_is_carried_over_and_the_step_that_would_exceed_the_bound_waits_for_it():
    # 0-2 the first completes, the second has 2 of 5 tokens; 2-3 training
    # 3-6 the third completes at 5, but the second, of version 0, must be in this step; 6-7 training
    # 7-8 the third is trained on at once
    lengths, cluster = work(2, 5, 2, 9, steps=3, prompt_tokens=1), Cluster(slots=2, speed=SECOND, train=1)
    predicted = simulate(lengths, cluster, Mode("partial", 1))
    assert predicted.seconds == pytest.approx(8 / 3)
    assert predicted.reprefill_tokens == (2 + 1) / 3
    assert (predicted.staleness, predicted.max_staleness) == (2 / 3, 1)
    wider = simulate(lengths, cluster, Mode("partial", 2))  # 0-2, training, 3-5, training, 6-7 the second
    assert (wider.seconds, wider.max_staleness) == (8 / 3, 2)


def test_interrupted_tokens_are_prefilled_before_their_response_continues():
    # the second: 2 of 5 tokens at 2; training until 3, prefill of 2 tokens at 4 per second until 3.5, complete at 6.5
    cluster = Cluster(slots=2, speed=SECOND, train=1, prefill_rate=4)
    assert simulate(work(2, 5, 5, 5, steps=2), cluster, Mode("partial", 1)).seconds == (6.5 + 1) / 2


def test_separate_pools_overlap_training_with_generation():
    # from the second step on: 2 s of generation next to 2 s of training on half of the devices, and the pause
    cluster = Cluster(engines=2, slots=1, speed=SECOND, train=1, pause=0.5)
    predicted = simulate(replace(work(2, steps=11), warmup=1), cluster, Mode("separate", 1, training_engines=1))
    assert predicted.seconds == pytest.approx(2.5)
    assert predicted.rollout_busy == pytest.approx(0.8)
    assert predicted.training_busy == pytest.approx(0.8)
    assert predicted.max_staleness == 1


@pytest.mark.parametrize(("queued", "at_once"), [(0, 1), (1, 2), (None, 4)])
def test_engines_are_kept_as_full_as_a_synchronous_step_makes_them_and_so_many_wait(queued, at_once):
    predicted = simulate(work(4, 4, 4, 4, steps=24), Cluster(slots=8, speed=SECOND), Mode("carried", 3, queued=queued))
    assert predicted.seconds == pytest.approx(4 / at_once, rel=0.2)


def test_over_sampling_leaves_the_slow_groups_for_a_later_step():
    # two are open: 2 s, then the rest of the 5 next to another 2, then its last second
    predicted = simulate(work(2, 5, 2, 9, steps=3), Cluster(slots=2, speed=SECOND), Mode("over", None, over_sampling=1))
    assert (predicted.seconds, predicted.max_staleness) == (5 / 3, 2)


def test_over_sampling_keeps_the_mean_staleness_at_its_share():
    lengths = log_normal_lengths(60 * 128, 4096, 0.8, 32768).reshape(-1, 1)
    run, cluster = Work(128, lengths, steps=50), Cluster(8, 16, SECOND, train=7000)
    bounded, limited = (simulate(run, cluster, Mode("partial", 4, share)) for share in (None, 0.5))
    assert limited.staleness == pytest.approx(0.5, abs=0.01) and bounded.staleness > 2
    assert limited.seconds < 1.15 * bounded.seconds


# sigma, engines x 16 slots, training/generation, and the gains of carried-over groups, half the devices, the best split
LAW = [
    (0.5, 16, 0.25, 1.53, 1.10, 1.50),
    (0.8, 16, 0.25, 1.90, 1.54, 1.84),
    (1.0, 16, 0.50, 1.70, 1.50, 1.65),
    (0.8, 64, 0.25, 3.34, 2.50, 3.25),
    (1.0, 64, 0.50, 2.42, 1.50, 2.40),
]


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "engines", "share", "carried", "half", "split"), LAW)
def test_gains_agree_with_an_independent_simulation(sigma, engines, share, carried, half, split):
    """1,024 responses per step of 4,096 tokens on average, of constant speed; the bound is too wide to matter."""
    lengths = log_normal_lengths(100 * 1024, 4096, sigma, 32768).reshape(-1, 1)
    run = Work(1024, lengths, steps=72, warmup=12)
    cluster = Cluster(engines, 16, SECOND)
    generation = simulate(run, cluster, SYNC).seconds
    cluster, sync = replace(cluster, train=share * generation), (1 + share) * generation
    assert sync / simulate(run, cluster, Mode("partial", 12)).seconds == pytest.approx(carried, rel=0.05)
    halves = Mode("separate", 12, training_engines=engines // 2)
    assert sync / simulate(run, cluster, halves).seconds == pytest.approx(half, rel=0.05)
    assert sync / best_split(run, cluster, 12).seconds == pytest.approx(split, rel=0.05)


def list_scheduled(lengths: list[float], slots: int) -> float:
    free = [0.0] * slots
    for length in lengths:
        heapq.heappush(free, heapq.heappop(free) + length)
    return max(free)


CASES = {
    "groups": st.integers(1, 4),
    "n": st.integers(1, 3),
    "engines": st.integers(2, 4),
    "slots": st.integers(1, 4),
    "seed": st.integers(0, 2**31),
}


def random_work(groups: int, n: int, seed: int, steps: int = 12) -> Work:
    lengths = np.random.default_rng(seed).geometric(0.1, (groups * steps * 3, n)).astype(float)
    return Work(groups, lengths, steps=steps, warmup=0)


@settings(max_examples=50, deadline=None)
@given(**CASES)
def test_bound_zero_and_no_over_sampling_are_synchronous(groups, n, engines, slots, seed):
    run, cluster = random_work(groups, n, seed), Cluster(engines, slots, SECOND, train=7.0)
    steps = run.lengths[: groups * run.steps].reshape(run.steps, -1)
    expected = np.mean([list_scheduled(lengths, engines * slots) + 7 for lengths in steps.tolist()])
    for mode in (SYNC, Mode("partial", 0), Mode("over", None, over_sampling=0)):
        predicted = simulate(run, cluster, mode)
        assert predicted.seconds == pytest.approx(expected, rel=1e-12)
        assert (predicted.max_staleness, predicted.reprefill_tokens) == (0, 0)


@settings(max_examples=200, deadline=None)
@given(
    **CASES,
    bound=st.integers(0, 5),
    over_sampling=st.none() | st.floats(0, 2),
    training_engines=st.integers(0, 1),
    queued=st.none() | st.floats(0, 3),
    train=st.floats(0, 50),
)
def test_no_episode_is_older_than_the_bound_and_no_run_waits_for_nothing(
    groups, n, engines, slots, seed, bound, over_sampling, training_engines, queued, train
):
    cluster = Cluster(engines, slots, SECOND, prefill_rate=100, train=train, pause=1.0)
    mode = Mode("any", bound, over_sampling, training_engines, queued)
    predicted = simulate(random_work(groups, n, seed), cluster, mode)
    assert predicted.staleness <= predicted.max_staleness <= bound
    assert 0 < predicted.rollout_busy <= 1 + 1e-9 and predicted.training_busy <= 1
