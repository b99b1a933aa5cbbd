"""The sentence and the lights: what they say of runs whose figures are known."""

from pathlib import Path

import pytest

from hybridrl.report.contents import Contents
from hybridrl.report.samples import ChosenSamples
from hybridrl.report.verdicts import duration, lights, number, sentence, validation_mean
from tests.report.synthetic import write_metrics


def lights_of(directory: Path, steps: list[dict]) -> dict[str, tuple[str, str]]:
    write_metrics(directory, steps)
    contents = Contents(directory)
    return {one.question: (one.state, one.reason) for one in lights(contents, ChosenSamples())}


def test_a_reward_that_rises_by_more_than_its_noise_is_learning(tmp_path):
    steps = [{"critic/rewards/mean": value} for value in (0.1, 0.12, 0.11, 0.5, 0.6, 0.8, 0.79, 0.81, 0.8, 0.82)]
    state, reason = lights_of(tmp_path, steps)["Does it learn?"]
    assert state == "good"
    assert reason == "reward 0.10 → 0.80 (first step; mean of the last 5)"


@pytest.mark.parametrize(
    ("values", "state"),
    [([0.5] * 10, "bad"), ([0.8, 0.81] * 4 + [0.1, 0.1], "bad"), ([0.1, 0.3] * 5, "fair"), ([0.1, 0.2], "unknown")],
)
def test_a_reward_that_does_not_rise_is_not(tmp_path, values, state):
    assert lights_of(tmp_path, [{"critic/rewards/mean": value} for value in values])["Does it learn?"][0] == state


def test_a_diagnosis_that_damages_is_bad_while_it_holds_and_a_warning_afterwards(tmp_path):
    held = [{"critic/rewards/mean": 0.5, "health/policy-jump": float(step in (2, 3))} for step in range(1, 7)]
    assert lights_of(tmp_path, held[:3])["Is it stable?"] == ("bad", "policy-jump in 2 steps, from step 2")
    assert lights_of(tmp_path, held)["Is it stable?"][0] == "fair"


def test_skipped_updates_and_cut_off_responses_are_seen(tmp_path):
    steps = [{"critic/rewards/mean": 0.1, "response_length/clip_ratio": 0.4, "actor/skipped_updates": 1.0}] * 5
    found = lights_of(tmp_path, steps)
    assert (
        found["Is it stable?"][0] == "bad"
        and "5 steps with updates that were not finite, first 1" in found["Is it stable?"][1]
    )
    assert found["Are the samples usable?"] == ("bad", "in the last steps: 40% cut off")


def test_phases_without_devices_are_idle_time(tmp_path):
    steps = [{"timing_s/step": 10.0, "timing_s/gen": 3.0, "timing_s/reward": 6.0, "timing_s/update_actor": 1.0}] * 3
    assert lights_of(tmp_path, steps)["Are the devices busy?"] == (
        "bad",
        "40% of the time in rollout, log-probs and update, reward 60%",
    )


def test_two_steps_do_not_show_whether_the_devices_are_busy(tmp_path):
    steps = [{"timing_s/step": 10.0, "timing_s/gen": 3.0, "timing_s/reward": 6.0}] * 2
    reason = "not judged by 2 steps, as the first are slower"
    assert lights_of(tmp_path, steps)["Are the devices busy?"] == ("unknown", reason)


def test_nothing_is_said_of_an_empty_directory(tmp_path):
    contents = Contents(tmp_path)
    states = [one.state for one in lights(contents, ChosenSamples())]
    assert states == ["unknown"] * 5
    assert sentence(contents, {}) == "No step was finished; no record of how it ended."


def test_durations_and_numbers_are_short():
    assert [duration(one) for one in (9.6, 60, 220, 7500, 360000)] == [
        "10 s",
        "1 min",
        "3 min 40 s",
        "2 h 5 min",
        "4 d 4 h",
    ]
    assert [number(one) for one in (0.123, 0.0, 1234.5, 2e-5)] == ["0.12", "0.00", "1,234", "2e-05"]
    assert [number(one) for one in (0.995, 0.99, 0.9999, 1.0)] == ["0.995", "0.99", "0.999", "1.00"]


def test_the_validation_of_several_sources_is_their_mean(tmp_path):
    write_metrics(tmp_path, [{"val-core/a/acc/mean@1": mean, "val-core/b/acc/mean@1": 0.4} for mean in (0.0, 0.4)])
    assert "validation (mean of 2 sources) 0.20 → 0.40" in sentence(Contents(tmp_path), {})


def test_faults_are_those_of_the_last_training_steps(tmp_path):
    write_metrics(tmp_path, [{"critic/rewards/mean": 0.5}])
    found = {one.question: one for one in lights(Contents(tmp_path), ChosenSamples(read=100, last_faults=0.03))}
    assert found["Are the samples usable?"].reason == "in the last steps: 3.0% not graded"


@pytest.mark.parametrize(
    ("solved", "stuck", "state", "reason"),
    [
        (0.7, 0.05, "good", "70% of the prompts are solved by every response and teach nothing more"),
        (
            0.1,
            0.65,
            "fair",
            "75% of the prompts teach nothing: all their responses score the same, and most of them not",
        ),
        (0.3, 0.1, "good", "all graded"),
    ],
)
def test_prompts_that_teach_nothing_are_a_warning_unless_they_are_solved(tmp_path, solved, stuck, state, reason):
    write_metrics(tmp_path, [{"critic/rewards/mean": 0.5}])
    samples = ChosenSamples(last_faults=0.0, solved=solved, stuck=stuck)
    light = lights(Contents(tmp_path), samples)[2]
    assert light.state == state and reason in light.reason


def test_the_mean_over_data_sources_is_of_validations_that_have_a_score_of_each(tmp_path):
    hard, easy = "val-core/hard/acc/mean@1", "val-core/easy/acc/mean@1"
    write_metrics(tmp_path, [{hard: 0.1, easy: 0.9}, {hard: 0.2}, {}, {hard: 0.3, easy: 0.9}])
    steps, means = validation_mean(Contents(tmp_path))
    assert len(steps) == 2 and means == pytest.approx([0.5, 0.6])
