from dataclasses import astuple

import pytest

from hybridrl.rewards.score import FaultGuard, RewardFaults, Score, checked

GOOD = Score(1.0)


def bad(fault: str = "timeout", detail: str = "no score within 60 s") -> Score:
    return Score(None, fault=fault, detail=detail)


def test_a_fault_s_name_and_detail_from_a_scoring_process_are_cut():
    score = checked(astuple(bad("n" * 200, "d" * 2000)))
    assert (score.fault, score.detail) == ("n" * 100, "d" * 1000)


def test_faults_are_counted_by_class():
    counts = FaultGuard("exclude", 0.9, 3).check([GOOD, bad(), bad("none"), bad()])
    assert counts == {"reward/faults": 3, "reward/faults/timeout": 2, "reward/faults/none": 1}


def test_a_step_without_faults_or_without_responses_counts_zero():
    guard = FaultGuard("exclude", 0.0, 1)
    assert guard.check([GOOD]) == {"reward/faults": 0}
    assert guard.check([]) == {"reward/faults": 0}


@pytest.mark.parametrize(("on_error", "value"), [("exclude", None), ("zero", 0.0)])
def test_faulty_scores_have_no_value_or_zero_and_keep_the_reason(on_error, value):
    scores = [GOOD, bad()]
    FaultGuard(on_error, 0.5, 3).apply(scores)
    assert [(score.value, score.fault) for score in scores] == [(1.0, None), (value, "timeout")]


def test_stop_ends_the_run_at_the_first_fault_with_an_example_of_the_commonest():
    scores = [GOOD, bad("none", "returned None"), bad(), bad()]
    with pytest.raises(RewardFaults) as raised:
        FaultGuard("stop", 0.9, 3).apply(scores)
    for part in ("3 of 4 responses", "67%", '"timeout"', "no score within 60 s", "reward.on_error=stop"):
        assert part in str(raised.value)


@pytest.mark.parametrize("on_error", ["exclude", "zero"])
def test_too_many_faults_in_several_steps_in_a_row_end_the_run(on_error):
    guard = FaultGuard(on_error, 0.25, 3)
    guard.check([bad(), GOOD])
    guard.check([bad(), GOOD])
    with pytest.raises(RewardFaults, match=r"reward\.max_fault_rate=0\.25 .* 3 steps in a row"):
        guard.check([bad(), GOOD])


def test_a_good_step_in_between_starts_the_count_again():
    guard = FaultGuard("exclude", 0.25, 2)
    for scores in ([bad(), GOOD], [GOOD, GOOD], [bad(), GOOD]):
        guard.check(scores)


def test_a_rate_at_the_limit_is_not_above_it():
    guard = FaultGuard("exclude", 0.5, 1)
    assert guard.check([bad(), GOOD])["reward/faults"] == 1
