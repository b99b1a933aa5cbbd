"""Which groups are under way and which a step takes: the bound holds, and no step waits indefinitely."""

import doctest
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.core.experience.asynchronous import Admission


def started(admission: Admission, positions: range, version: int) -> Admission:
    admission.start(positions, version)
    return admission


def test_with_a_bound_of_zero_a_step_waits_for_all_its_groups_and_starts_no_others():
    admission = started(Admission(0, batch=3, most=3), range(3), 0)
    assert admission.capacity() == 0
    assert admission.choose(0, {0, 2}) is None
    assert admission.choose(0, {0, 1, 2}) == [0, 1, 2]


def test_a_step_takes_the_groups_that_are_complete_those_that_are_due_first_before_others():
    admission = started(started(Admission(2, batch=2, most=6), range(2), 0), range(2, 5), 1)
    assert admission.choose(1, {4}) is None
    assert admission.choose(1, {3, 4, 1}) == [1, 3]


def test_a_step_waits_for_a_group_that_is_due():
    admission = started(started(Admission(1, batch=1, most=2), range(1), 0), range(1, 2), 1)
    assert admission.choose(1, {1}) is None, (
        "group 0 was started at version 0, and this is the last step that may train it"
    )
    assert admission.choose(1, {0}) == [0]


def test_a_step_waits_if_more_would_be_due_later_than_later_steps_can_train():
    """Bound 2, a batch of one: of two groups of version 0 that are left at version 1, one fits into version 2."""
    admission = started(started(Admission(2, batch=1, most=3), range(2), 0), range(2, 3), 1)
    assert admission.choose(1, {2}) is None
    assert admission.choose(1, {1, 2}) == [1]


def test_fewer_groups_than_a_batch_are_a_step_at_the_end_of_the_data():
    admission = started(Admission(1, batch=4, most=8), range(2), 3)
    assert admission.choose(3, {0}) is None
    assert admission.choose(3, {0, 1}) == [0, 1]


def test_the_goal_of_an_engine_is_what_is_missing_for_the_choice():
    admission = started(started(Admission(1, batch=2, most=4), range(3), 0), range(3, 4), 1)
    goal = admission.goal(1, {0})
    assert not goal.reached({1}), "groups 1 and 2 are due as well"
    assert goal.reached({1, 2})


def test_the_example_in_its_docstring_is_true():
    (example,) = doctest.DocTestFinder(recurse=False).find(Admission, globs={"Admission": Admission})
    assert doctest.DocTestRunner().run(example) == (0, 7)


@given(bound=st.integers(0, 4), batch=st.integers(1, 5), share=st.floats(1.0, 4.0), seed=st.integers(0, 2**32 - 1))
def test_every_group_is_trained_once_and_never_later_than_the_bound(bound, batch, share, seed):
    chance = random.Random(seed)
    admission = Admission(bound, batch, max(batch, int(batch * share)))
    position, complete, trained = 0, set(), []
    for version in range(12):
        while (capacity := admission.capacity()) > 0 and (len(admission.started) < batch or chance.random() < 0.5):
            count = chance.randint(1, capacity)
            admission.start(range(position, position + count), version)
            position += count
        while (chosen := admission.choose(version, complete)) is None:
            waiting = admission.started.keys() - complete
            assert waiting, "it waits although all groups are complete"
            complete.add(chance.choice(sorted(waiting)))
        assert len(chosen) == batch
        assert all(0 <= version - admission.started[one] <= bound for one in chosen)
        trained += chosen
        complete -= set(chosen)
        admission.end(chosen)
        assert len(admission.started) <= admission.most - batch + 1 or admission.capacity() >= 0
    assert len(trained) == len(set(trained))
    assert set(trained) | admission.started.keys() == set(range(position))


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_what_is_under_way_never_exceeds_the_limit(bound):
    admission = Admission(bound, batch=4, most=6)
    admission.start(range(admission.capacity()), 0)
    assert len(admission.started) == (4 if bound == 0 else 6)
    assert admission.capacity() == 0
