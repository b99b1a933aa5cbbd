"""What engines did, added up from what vLLM's scheduler reports, and as metrics: numbers by hand."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from hybridrl.core.rollout.engine import EngineStats, engine_metrics
from hybridrl.core.rollout.vllm.collector import Observer


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def report(
    engine: Observer,
    clock: Clock,
    seconds: float,
    running: int,
    waiting: int = 0,
    cache: float = 0.0,
    **more: int,
) -> None:
    """One iteration of `seconds`, after which so many requests run and wait."""
    clock.now += seconds
    prefix = SimpleNamespace(queries=more.get("queries", 0), hits=more.get("hits", 0))
    engine.sampled, engine.prefilled = more.get("tokens", 0), more.get("prompts", 0)
    engine.record(
        SimpleNamespace(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_skipped_waiting_reqs=0,
            kv_cache_usage=cache,
            prefix_cache_stats=prefix,
        ),
    )


def test_a_rollout_is_described_by_its_running_and_waiting_requests_its_cache_and_its_tail(clock):
    engine = Observer(clock)
    engine.submitted()
    report(engine, clock, 1.0, running=8, waiting=4, cache=0.5, queries=100, hits=30)
    report(engine, clock, 2.0, running=8, cache=0.9, tokens=8)
    report(engine, clock, 3.0, running=3, cache=0.3, tokens=8)  # 8 ran in it, of which 5 finished
    report(engine, clock, 1.0, running=1, cache=0.1, tokens=3)
    report(engine, clock, 3.0, running=0, tokens=1)
    stats = engine.take()
    assert stats.seconds == {8: 6.0, 3: 1.0, 1: 3.0}
    metrics = engine_metrics([stats], 8)
    assert {name: value for name, value in metrics.items() if "iteration_s" not in name} == pytest.approx(
        {
            "rollout/preemptions": 0,
            "rollout/kv_cache_usage/max": 0.9,
            "rollout/kv_cache_usage/mean": (0.5 + 1.8 + 0.9 + 0.1) / 10,
            "rollout/running_requests/max": 8,
            "rollout/running_requests/mean": (48 + 3 + 3) / 10,
            "rollout/busy_share": 5.4 / 8,
            "rollout/waiting_requests/max": 4,
            "rollout/prefix_cache_hit_share": 0.3,
            "rollout/tokens_per_s": 2,
            "rollout/tail_share": 0.4,
            "rollout/last_request_share": 0.3,
        }
    )


def speed(iterations: list[tuple[int, int, float]], clock: Clock) -> list[float]:
    """What is fitted to iterations by their running requests, prefilled tokens and seconds, split over two engines."""
    engines = Observer(clock), Observer(clock)
    for number, (running, prefilled, seconds) in enumerate(iterations):
        engine = engines[number % 2]
        engine.running, engine.since = 0, clock.now
        report(engine, clock, seconds, running, prompts=prefilled + 100, hits=100)
    metrics = engine_metrics([engine.take() for engine in engines], 8)
    return [metrics[f"rollout/iteration_s/{part}"] for part in ("fixed", "running_request", "prefilled_token")]


def test_an_iteration_takes_a_time_for_itself_for_each_running_request_and_for_each_token_it_prefills(clock):
    had = [(1, 0), (8, 0), (8, 200), (3, 50), (5, 0), (2, 0)]
    iterations = [(running, prefilled, 0.5 + 0.1 * running + 0.01 * prefilled) for running, prefilled in had]
    assert speed(iterations, clock) == pytest.approx([0.5, 0.1, 0.01])
    fixed, running, prefilled = speed([(4, 0, 2.0)] * 3, clock)
    assert (fixed + 4 * running, prefilled) == (pytest.approx(2), 0), "what the iterations cannot distinguish"


def test_nothing_makes_an_iteration_faster(clock):
    """Lines through these have -0.1 s for each request, and -1 s for the iteration itself: without them the mean is
    left, and (1 x 0.5 + 2 x 2) / (1 x 1 + 2 x 2) for each request."""
    assert speed([(1, 0, 1.0), (3, 0, 0.8), (1, 0, 1.0), (3, 0, 0.8)], clock) == pytest.approx([0.9, 0, 0])
    assert speed([(1, 0, 0.5), (2, 0, 2.0)], clock) == pytest.approx([0, 0.9, 0])


def test_hits_of_a_prompt_that_is_computed_in_parts_count_with_its_end(clock):
    engine = Observer(clock)
    engine.submitted()
    report(engine, clock, 0.5, running=1, hits=60)
    report(engine, clock, 1.5, running=1, prompts=100)
    report(engine, clock, 0.5, running=0)
    assert engine.take().products[2, 2] == 40**2


def test_the_time_between_two_rollouts_and_the_probe_of_a_sync_is_not_counted(clock):
    engine = Observer(clock)
    engine.submitted()
    report(engine, clock, 1.0, running=0)
    report(engine, clock, 60.0, running=0)  # the probe, which is not a request of a rollout
    clock.now += 60
    engine.submitted()
    engine.submitted()
    report(engine, clock, 2.0, running=2)
    assert engine.take().seconds == {0: 1.0, 2: 2.0}
    report(engine, clock, 5.0, running=2)
    assert engine.take().seconds == {2: 5.0}, "what was taken is not counted again"


def test_counts_of_engines_add_up_and_the_longest_tail_counts():
    one = EngineStats({4: 2.0}, cache_seconds=2.0, cache_peak=1.0, waiting_peak=3, preemptions=1, tokens=100)
    other = EngineStats({4: 3.0, 1: 3.0}, cache_seconds=1.0, cache_peak=0.2, preemptions=2, tokens=60)
    metrics = engine_metrics([one, other, EngineStats()], 4)
    assert metrics["rollout/preemptions"] == 3 and metrics["rollout/waiting_requests/max"] == 3
    assert metrics["rollout/kv_cache_usage/max"] == 1.0
    assert metrics["rollout/kv_cache_usage/mean"] == pytest.approx(3 / 8)
    assert metrics["rollout/tokens_per_s"] == pytest.approx(50 + 10)
    assert metrics["rollout/tail_share"] == metrics["rollout/last_request_share"] == 0.5


def test_a_rollout_of_one_request_has_no_tail_and_without_requests_there_are_no_metrics():
    assert engine_metrics([EngineStats({1: 5.0})], 4)["rollout/last_request_share"] == 0
    assert engine_metrics([EngineStats()], 4) == {}
