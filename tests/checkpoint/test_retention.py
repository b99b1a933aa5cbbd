"""Lineage and retention of checkpoints."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.checkpoint.store import Checkpoint, lineage, retained


def checkpoints(*steps: int, **state) -> list[Checkpoint]:
    return [
        Checkpoint(step, Path(f"global_step_{step}"), {"healthy": True, "recovery": False, "metrics": {}} | state)
        for step in steps
    ]


def numbers(listed: list[Checkpoint]) -> set[int]:
    return {one.step for one in listed}


@pytest.mark.parametrize(
    ("published", "led_to_the_newest"),
    [
        ([], []),
        ([5, 10, 15], [5, 10, 15]),
        ([5, 10, 15, 7], [5, 7]),
        ([5, 10, 15, 7, 12], [5, 7, 12]),
        ([50, 100, 10, 20], [10, 20]),
    ],
)
def test_abandoned_checkpoints_are_not_in_the_lineage(published, led_to_the_newest):
    assert [one.step for one in lineage(checkpoints(*published))] == led_to_the_newest


@pytest.mark.parametrize(("keep", "kept"), [(None, {5, 10, 15}), (1, {15}), (2, {10, 15}), (9, {5, 10, 15})])
def test_the_newest_are_retained(keep, kept):
    assert numbers(retained(checkpoints(5, 10, 15), keep, None)) == kept


def test_the_newest_are_those_published_last_not_those_of_the_latest_step():
    assert numbers(retained(checkpoints(5, 10, 7), 1, None)) == {7}


@pytest.mark.parametrize(
    ("published", "kept"), [([5, 10, 15, 12], {10, 12}), ([50, 100, 10], {100, 10}), ([50, 100, 10, 20], {10, 20})]
)
def test_abandoned_checkpoints_are_deleted_first(published, kept):
    assert numbers(retained(checkpoints(*published), 2, None)) == kept


@pytest.mark.parametrize("keep", [None, 2])
def test_a_recovery_checkpoint_is_retained_until_the_next_one_and_is_not_counted(keep):
    steps = [*checkpoints(5, 10), *checkpoints(12, recovery=True)]
    assert numbers(retained(steps, keep, None)) == {5, 10, 12}
    assert numbers(retained([*steps, *checkpoints(14, recovery=True)], keep, None)) == {5, 10, 14}
    assert numbers(retained([*steps, *checkpoints(15)], keep, None)) == ({5, 10, 15} if keep is None else {10, 15})


@pytest.mark.parametrize("recovery", [False, True])
def test_an_unhealthy_checkpoint_supersedes_none(recovery):
    steps = [*checkpoints(5), *checkpoints(10, recovery=recovery), *checkpoints(15, 20, healthy=False)]
    assert numbers(retained(steps, 1, None)) == ({5, 10, 20} if recovery else {10, 20})
    assert numbers(retained([*steps, *checkpoints(25)], 1, None)) == {25}


def measured(values: dict[int, float]) -> list[Checkpoint]:
    return [one for step, value in values.items() for one in checkpoints(step, metrics={"val/score": value})]


@pytest.mark.parametrize(
    ("keep_best", "best"), [("val/score", 10), ("-val/score", 5), ("val/other", 25), ("-val/other", 25)]
)
def test_the_best_by_a_metric_is_retained_too(keep_best, best):
    steps = [*measured({5: 0.1, 10: 0.9, 15: 0.5, 20: float("nan")}), *checkpoints(25)]
    assert numbers(retained(steps, 1, keep_best)) == {best, 25}


def test_of_equally_good_checkpoints_the_newest_is_retained():
    assert numbers(retained(measured({5: 0.9, 10: 0.9, 15: 0.1}), 1, "val/score")) == {10, 15}


@pytest.mark.parametrize("state", [{"healthy": False}, {"recovery": True}], ids=str)
def test_only_a_healthy_regular_checkpoint_can_be_the_best(state):
    steps = [*measured({5: 0.5}), *checkpoints(10, metrics={"val/score": 0.9}, **state), *checkpoints(15)]
    assert numbers(retained(steps, 1, "val/score")) == {5, 15}


@given(
    st.lists(st.tuples(st.integers(1, 30), st.booleans(), st.booleans()), unique_by=lambda step: step[0]),
    st.none() | st.integers(1, 4),
)
def test_the_newest_checkpoint_and_the_newest_healthy_one_are_always_retained(steps, keep):
    listed = [one for step, healthy, recovery in steps for one in checkpoints(step, healthy=healthy, recovery=recovery)]
    healthy = [one for one in listed if one.state["healthy"]]
    assert numbers([*listed[-1:], *healthy[-1:]]) <= numbers(retained(listed, keep, None)) <= numbers(listed)
