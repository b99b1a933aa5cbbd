"""Which responses an evaluation needs, and what their keys depend on."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hybridrl.checkpoint.resume import sample_hash
from hybridrl.core.carried import PICTURE_DIGEST, PICTURE_START
from hybridrl.core.rollout import Sampling
from hybridrl.data.prompts import Prompt
from hybridrl.evaluation.plan import Origin, collect_questions, counts, plan
from hybridrl.evaluation.samples import GREEDY

SAMPLING, ORIGIN = Sampling(8, (0,)), Origin("model", "reward")


def prompt(row: int, source: str = "maths", truth: str = "4", **more: object) -> Prompt:
    return Prompt(row, [row, 1], f"question {row}", source, truth, **{"extra_info": {}} | more)


def test_the_hashes_by_which_earlier_evaluations_find_their_samples_stay_as_they_are():
    assert sample_hash("\u00e9\ud800", 1, {"b": [1.5, None], "a": Path("x")}) == "32037c599e2dcce708a4"


@pytest.mark.parametrize(("size", "count"), [(30, 32), (99, 32), (100, 8), (499, 8), (500, 4), (1319, 4)])
def test_the_fewer_questions_the_more_responses_each_gets(size, count):
    questions = collect_questions({"a.jsonl": [prompt(row) for row in range(size)]})
    assert counts(questions, None, 1.0) == {"maths": count}


def test_a_number_that_is_set_and_greedy_sampling_win():
    questions = collect_questions({"a.jsonl": [prompt(0)]})
    assert counts(questions, 5, 1.0) == {"maths": 5} and counts(questions, None, 0.0) == {"maths": 1}


def test_datasets_are_data_sources_and_files_where_two_have_the_same():
    files = {"data/aime24.jsonl": [prompt(0)], "data/aime25.jsonl": [prompt(0), prompt(1, "other")]}
    assert [(one.dataset, one.number) for one in collect_questions(files)] == [
        ("aime24", 0),
        ("aime25", 1),
        ("other", 2),
    ]


def test_files_of_the_same_name_are_datasets_named_by_their_folders():
    names = ("en/test.jsonl", "de/test.jsonl", "de/other.jsonl", "other.json", "test.parquet")
    questions = collect_questions({name: [prompt(0)] for name in names})
    assert [one.dataset for one in questions][:3] == ["en/test", "de/test", "de/other"]
    assert len({(one.dataset, one.id) for one in questions}) == 5


def test_a_file_that_is_named_as_a_data_source_is_another_dataset():
    files = {"a.jsonl": [prompt(0, "b")], "b.jsonl": [prompt(0)], "c.jsonl": [prompt(0)]}
    assert len({(one.dataset, one.id) for one in collect_questions(files)}) == 3


def test_keys_and_seeds_stay_as_files_are_added_and_equal_questions_have_different_ones():
    files = {"a.jsonl": [prompt(0), prompt(0)], "b.jsonl": [prompt(0), prompt(1)]}
    options = {"sampling": SAMPLING, "greedy": None, "seed": 1, "origin": ORIGIN}
    alone = plan(collect_questions({"a.jsonl": files["a.jsonl"]}), {"maths": 1}, **options)
    both = plan(collect_questions(files), {"a": 1, "b": 1}, **options)
    assert [(one.key, one.seed) for one in alone] == [(one.key, one.seed) for one in both][:2]
    assert len({one.key for one in both}) == len({one.seed for one in both}) == 4


def test_a_response_of_an_environment_depends_on_its_whole_row():
    whole, rows = Origin("model", "", whole_rows=True), [prompt(0, columns={"secret": n}) for n in (1, 2)]
    assert keys(rows[:1], origin=whole) != keys(rows[1:], origin=whole)
    assert keys(rows[:1]) == keys(rows[1:])


def test_questions_have_their_rows_ids_if_these_are_unique():
    named = [prompt(row, columns={"id": name}) for row, name in enumerate("xy")]
    numbered = [prompt(row, extra_info={"index": row + 7}) for row in range(2)]
    twice = [prompt(row, extra_info={"index": 7}) for row in range(2)]
    assert [one.id for one in collect_questions({"a": named})] == ["x", "y"]
    assert [one.id for one in collect_questions({"a": numbered})] == ["7", "8"]
    assert [one.id for one in collect_questions({"a": twice})] == ["0", "1"]


def keys(prompts: list[Prompt], **changed: object) -> list[str]:
    options = {"sampling": SAMPLING, "greedy": None, "seed": 1, "origin": ORIGIN} | changed
    return [one.key for one in plan(collect_questions({"a": prompts}), {"maths": 2}, **options)]


def test_every_response_has_its_own_key_and_seed():
    wanted = plan(collect_questions({"a": [prompt(0), prompt(1)]}), {"maths": 2}, SAMPLING, None, 1, ORIGIN)
    assert [(one.question.id, one.sample) for one in wanted] == [("0", 0), ("0", 1), ("1", 0), ("1", 1)]
    assert len({one.key for one in wanted}) == len({one.seed for one in wanted}) == 4


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 2},
        {"sampling": Sampling(9, (0,))},
        {"sampling": Sampling(8, (0,), 0.5)},
        {"origin": Origin("x", "reward")},
    ],
)
def test_the_key_changes_with_model_sampling_and_seed(changed):
    assert not set(keys([prompt(0)])) & set(keys([prompt(0)], **changed))


def test_the_key_stays_as_questions_are_added_and_samples_become_more_and_the_reward_changes():
    few, more = [prompt(0)], [prompt(0), prompt(1)]
    assert keys(few) == keys(more)[:2] == keys(few, origin=Origin("model", "other"))
    changed = plan(collect_questions({"a": few}), {"maths": 2}, SAMPLING, None, 1, Origin("model", "other"))
    same = plan(collect_questions({"a": few}), {"maths": 2}, SAMPLING, None, 1, ORIGIN)
    assert changed[0].reward != same[0].reward


def test_another_ground_truth_is_another_reward_of_the_same_response():
    first, second = (
        plan(collect_questions({"a": [prompt(0, truth=truth)]}), {"maths": 1}, SAMPLING, None, 1, ORIGIN)[0]
        for truth in "45"
    )
    assert first.key == second.key and first.reward != second.reward


def test_a_greedy_response_is_added_with_its_own_sampling():
    greedy = Sampling(8, (0,), 0.0)
    wanted = plan(collect_questions({"a": [prompt(0)]}), {"maths": 1}, SAMPLING, greedy, 1, ORIGIN)
    assert [(one.sample, one.sampling.temperature) for one in wanted] == [(GREEDY, 0.0), (0, 1.0)]


def test_questions_with_the_same_text_and_other_pictures_are_others():
    def shown(row: int, *digests: int) -> Prompt:
        fields = {PICTURE_DIGEST: np.array(digests), PICTURE_START: np.zeros(len(digests), np.int32)}
        return replace(prompt(0), row=row, carried=fields if digests else {})

    first, second, text = shown(0, 5), shown(1, 6), shown(2)
    questions = collect_questions({"a": [first, second, text, shown(3, 5)]})
    assert [one.repeat for one in questions] == [0, 0, 0, 1]
    assert len({one.seed_key for one in questions}) == len({*keys([first, second, text, shown(3, 5)])}) / 2 == 4
    assert keys([second]) == keys([first, second])[2:], "whatever other rows there are"
    assert keys([text]) == keys([prompt(0)]), "as without pictures"
