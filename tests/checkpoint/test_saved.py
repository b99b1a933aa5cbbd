from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.checkpoint.saved import Saved, course, staying


def saved(*steps: int, **state) -> list[Saved]:
    return [
        Saved(step, Path(f"global_step_{step}"), {"healthy": True, "recovery": False, "metrics": {}} | state)
        for step in steps
    ]


def numbers(found: list[Saved]) -> set[int]:
    return {one.step for one in found}


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
def test_what_a_run_that_went_back_has_left_behind_is_not_on_its_course(published, led_to_the_newest):
    assert [one.step for one in course(saved(*published))] == led_to_the_newest


@pytest.mark.parametrize(("keep", "stay"), [(None, {5, 10, 15}), (1, {15}), (2, {10, 15}), (9, {5, 10, 15})])
def test_the_newest_stay_as_many_as_asked_for(keep, stay):
    assert numbers(staying(saved(5, 10, 15), keep, None)) == stay


def test_the_newest_are_those_published_last_not_those_with_the_largest_number():
    assert numbers(staying(saved(5, 10, 7), 1, None)) == {7}


@pytest.mark.parametrize(
    ("published", "stay"), [([5, 10, 15, 12], {10, 12}), ([50, 100, 10], {100, 10}), ([50, 100, 10, 20], {10, 20})]
)
def test_what_a_run_has_left_behind_goes_first(published, stay):
    assert numbers(staying(saved(*published), 2, None)) == stay


@pytest.mark.parametrize("keep", [None, 2])
def test_a_step_saved_for_recovery_stays_until_a_newer_one_is_there_and_takes_no_place(keep):
    steps = [*saved(5, 10), *saved(12, recovery=True)]
    assert numbers(staying(steps, keep, None)) == {5, 10, 12}
    assert numbers(staying([*steps, *saved(14, recovery=True)], keep, None)) == {5, 10, 14}
    assert numbers(staying([*steps, *saved(15)], keep, None)) == ({5, 10, 15} if keep is None else {10, 15})


@pytest.mark.parametrize("recovery", [False, True])
def test_no_step_gives_way_to_one_that_is_not_healthy(recovery):
    steps = [*saved(5), *saved(10, recovery=recovery), *saved(15, 20, healthy=False)]
    assert numbers(staying(steps, 1, None)) == ({5, 10, 20} if recovery else {10, 20})
    assert numbers(staying([*steps, *saved(25)], 1, None)) == {25}


def measured(values: dict[int, float]) -> list[Saved]:
    return [one for step, value in values.items() for one in saved(step, metrics={"val/score": value})]


@pytest.mark.parametrize(
    ("keep_best", "best"), [("val/score", 10), ("-val/score", 5), ("val/other", 25), ("-val/other", 25)]
)
def test_the_best_by_a_metric_stays_too(keep_best, best):
    steps = [*measured({5: 0.1, 10: 0.9, 15: 0.5, 20: float("nan")}), *saved(25)]
    assert numbers(staying(steps, 1, keep_best)) == {best, 25}


def test_of_equally_good_steps_the_newest_stays():
    assert numbers(staying(measured({5: 0.9, 10: 0.9, 15: 0.1}), 1, "val/score")) == {10, 15}


@pytest.mark.parametrize("state", [{"healthy": False}, {"recovery": True}], ids=str)
def test_only_a_healthy_step_that_was_not_saved_for_recovery_can_be_the_best(state):
    steps = [*measured({5: 0.5}), *saved(10, metrics={"val/score": 0.9}, **state), *saved(15)]
    assert numbers(staying(steps, 1, "val/score")) == {5, 15}


@given(
    st.lists(st.tuples(st.integers(1, 30), st.booleans(), st.booleans()), unique_by=lambda step: step[0]),
    st.none() | st.integers(1, 4),
)
def test_the_newest_step_and_the_newest_healthy_one_always_stay(steps, keep):
    found = [one for step, healthy, recovery in steps for one in saved(step, healthy=healthy, recovery=recovery)]
    healthy = [one for one in found if one.state["healthy"]]
    assert numbers([*found[-1:], *healthy[-1:]]) <= numbers(staying(found, keep, None)) <= numbers(found)
