"""Which samples are chosen, and what is known of them."""

import json

import pytest

from hybridrl.report.contents import Contents
from hybridrl.report.markup import TEXT_BUDGET, finite_number, limit_of, shortened
from hybridrl.report.samples import advantage_of, choose_samples, correlation, evenly, length_of
from hybridrl.tracking.records import SampleRecord, by_group
from tests.report.synthetic import verl_sample, write_run


def record(score: float | None, prompt: str = "p", **episode: object) -> SampleRecord:
    return SampleRecord(prompt, "r", "t", score, 1, {}, dict(episode))


def test_every_reason_is_there_and_the_first_the_middle_and_the_last_step_have_a_whole_group(tmp_path):
    samples = choose_samples(Contents(write_run(tmp_path / "run")), 200)
    reasons = {why for one in samples.shown for why in one.why}
    assert {"best", "worst", "median", "longest", "random", "largest advantage", "tokens", "fault: timeout"} <= reasons
    whole = [one for one in samples.shown if "whole group" in one.why]
    assert sorted({one.record.step for one in whole}) == [1, 7, 12]
    assert all(len({id(one.group) for one in whole if one.record.step == step}) == 1 for step in (1, 7, 12))


def test_the_same_rows_are_shown_in_every_validation(tmp_path):
    samples = choose_samples(Contents(write_run(tmp_path / "run")), 200)
    rows = {}
    for one in samples.shown:
        if one.kind == "validation":
            rows.setdefault(one.record.step, set()).add(one.record.episode["row"])
    assert sorted(rows) == [0, 4, 8, 12] and len({frozenset(each) for each in rows.values()}) == 1


@pytest.mark.parametrize("count", [40, 200])
def test_no_more_samples_are_chosen_than_there_is_room_for(tmp_path, count):
    contents = Contents(write_run(tmp_path / "run", steps=300, prompts=2))
    assert len(choose_samples(contents, count).shown) <= count + 6


def test_of_many_steps_some_are_shown_and_the_rest_counted(tmp_path):
    samples = choose_samples(Contents(write_run(tmp_path / "run", steps=900, validate_every=0, prompts=1, n=1)), 60)
    assert (samples.steps, samples.steps_read) == (900, 600)
    steps = {one.record.step for one in samples.shown}
    assert {1, 900} <= steps


def test_groups_are_those_of_a_position_and_of_a_prompt_in_verls_files():
    ours = [record(1.0, "same", position=1), record(0.0, "same", position=2), record(0.0, "same", position=1)]
    assert [len(group) for group in by_group(ours).values()] == [2, 1]
    assert [len(group) for group in by_group([record(1.0, "a"), record(0.0, "b"), record(0.0, "a")]).values()] == [2, 1]


def test_the_advantage_within_a_group_is_that_of_grpo():
    # Eight responses, one right: (1 - 1/8) / 0.35355 = 2.4749
    group = [record(1.0), *[record(0.0) for _ in range(7)]]
    assert advantage_of(group[0], group) == pytest.approx(2.4749, abs=1e-4)
    assert advantage_of(group[0], group[:1]) is None
    assert advantage_of(record(None), group) is None
    assert advantage_of(group[1], group[1:]) == 0.0
    assert advantage_of(record(1.0, advantage=-0.5), group) == -0.5, "that of the record, if it has one"


def test_bands_are_of_the_mean_rewards_of_prompts(tmp_path):
    samples = choose_samples(Contents(write_run(tmp_path / "run", prompts=6, record=verl_sample)), 100)
    steps, low = samples.bands["groups/p10"]
    assert steps == list(range(1, 13))
    assert all(a <= b for a, b in zip(low, samples.bands["groups/p90"][1], strict=True))


def test_the_correlation_is_pearsons_and_none_without_spread():
    pairs = [(float(number), 2.0 * number) for number in range(10)]
    assert correlation(pairs) == pytest.approx(1.0)
    assert correlation([(1.0, float(number)) for number in range(10)]) is None
    assert correlation(pairs[:9]) is None


def test_items_at_equal_distances_include_both_ends():
    assert evenly([1, 2, 3, 4, 5], 3) == [1, 3, 5]
    assert evenly([1, 2], 3) == [1, 2]
    assert evenly([1, 2, 3], 1) == [3]


def test_texts_are_shortened_in_the_middle_until_they_keep_to_the_budget():
    lengths = [10_000_000, 100]
    assert sum(min(length, limit_of(lengths)) for length in lengths) <= TEXT_BUDGET
    assert limit_of([100, 200]) == 1500
    assert (
        shortened("a" * 100 + "z" * 100, 40)
        == "a" * 30 + "\n[... 160 characters are not in this page ...]\n" + "z" * 10
    )


def test_no_number_is_too_large_for_a_page():
    assert [finite_number(one) for one in (10**400, 3, float("inf"), True)] == [None, 3, None, 1]
    assert length_of(record(1.0, sampled_tokens=10**400)) == 1


def test_groups_of_one_score_are_solved_or_stuck_unless_they_have_an_advantage(tmp_path):
    scores = [(1.0, 1.0), (0.95, 0.95), (0.0, 0.0), (0.0, 1.0), (0.0, 0.0)]
    rows = [
        {"input": f"{group}", "output": "x", "gts": "", "score": score, "step": 1, "episode": {"position": group}}
        for group, pair in enumerate(scores)
        for score in pair
    ]
    for row in rows[-2:]:
        row["episode"]["advantage"] = -0.5  # by a critic
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = choose_samples(Contents(tmp_path), 20)
    assert (samples.solved, samples.stuck) == (0.4, 0.2)
