"""Several rewards: further functions, weights, rewards per token."""

import pytest

from hybridrl.config import ConfigError
from hybridrl.rewards.load import load_reward, uses_built_in
from hybridrl.rewards.score import LARGEST, Score, ScoringRequest, component_means, score_request, to_score

DICT = "def compute_score(solution_str): return {'correct': 1, 'format': 0.5, 'note': 'good'}"
FURTHER = """
def length(solution_str): return len(solution_str)
async def failing(solution_str): raise OSError("gone")
def compute_score(solution_str): return 3
def none(solution_str): return None
def half(solution_str): return {"score": None, "note": "no opinion"}
"""


@pytest.fixture
def parts(reward_config, tmp_path):
    """Return the score of a response "four" by a reward file with further keys; {further} has functions."""
    (tmp_path / "further.py").write_text(FURTHER)

    def score(source: str | None, data_source: str = "test", **more) -> Score:
        functions = {name: f"{tmp_path / 'further.py'}{tail}" for name, tail in more.pop("functions", {}).items()}
        config = reward_config(source, more=more | {"functions": functions})
        return score_request(load_reward(config).score, ScoringRequest(data_source, "four", "42", {}))

    return score


def test_weights_of_keys_make_the_score_of_a_dict_without_one(parts):
    score = parts(DICT, weights={"correct": 1.0, "format": 0.2})
    assert score.value == pytest.approx(1.1)
    assert score.extras == {"correct": 1, "format": 0.5, "note": "good", "score": score.value}
    assert parts(DICT).fault == "type"  # without weights


def test_further_functions_add_to_the_score_under_their_names(parts):
    score = parts("def compute_score(solution_str): return 0.5", functions={"length": ":length", "three": ""})
    assert score == Score(0.5 + 4 + 3, {"acc": 0.5, "length": 4.0, "three": 3.0, "score": 7.5})


def test_only_what_has_a_weight_counts_and_that_of_score_is_the_main_functions_own(parts):
    functions = {"length": ":length", "three": ""}
    assert parts(DICT, functions=functions, weights={"three": 2, "format": 1}).value == 6.5
    source = "def compute_score(solution_str): return 0.5"
    assert parts(source, functions=functions, weights={"score": 10, "length": 1}).value == 9.0


def test_the_main_function_is_not_called_if_it_has_no_weight(parts, reward_config):
    assert parts(None, "poems", functions={"length": ":length"}, weights={"length": 0.5}).value == 2.0
    assert not uses_built_in(reward_config(more={"functions": {"a": "x.py"}, "weights": {"a": 1}}))
    assert uses_built_in(reward_config(more={"functions": {"a": "x.py"}}))


def test_a_fault_of_any_function_is_the_responses(parts):
    score = parts(DICT, functions={"judge": ":failing"}, weights={"judge": 1, "correct": 1})
    assert (score.value, score.fault) == (None, "raised:OSError")


@pytest.mark.parametrize(
    ("main", "functions", "weights", "value"),
    [
        ("0.5", {"a": ":none", "b": ""}, {}, 3.5),
        ("{'score': None, 'format': 0.5}", {"b": ""}, {"score": 9, "format": 1, "b": 1}, 3.5),
        ("{'correct': None, 'format': 0.5}", {}, {"correct": 1, "format": 2}, 1.0),
        ("0.5", {"half": ":half"}, {"score": 1, "half": 7}, 0.5),
        ("None", {"a": ":none", "half": ":half"}, {}, None),
        ("{'correct': None, 'format': None}", {}, {"correct": 1, "format": 2}, None),
    ],
)
def test_a_reward_that_returns_none_leaves_the_response_to_the_others(parts, main, functions, weights, value):
    score = parts(f"def compute_score(solution_str): return {main}", functions=functions, weights=weights)
    assert (score.value, score.fault) == (value, "none" if value is None else None)
    if value is not None:
        assert all(score.extras[name] is None for name in functions if name in ("a", "half"))
    else:
        assert "every reward returned None: " in score.detail


def test_a_weighted_sum_is_as_large_as_a_score_may_be(parts):
    assert parts("def compute_score(): return 1e18", weights={"score": 100.0}).fault == "nan"


@pytest.mark.parametrize("name", ["accuracy", "note"])
def test_a_weight_without_a_number_is_a_fault_that_names_the_keys(parts, name):
    score = parts(DICT, weights={name: 1.0})
    assert score.fault == "type"
    assert f"reward.weights.{name}" in score.detail and "correct, format, note" in score.detail


def test_a_further_function_that_is_missing_is_rejected_by_its_key(parts):
    with pytest.raises(ConfigError, match=r"reward\.functions\.a=.*further\.py:lenght is not in .*: length"):
        parts(DICT, functions={"a": ":lenght"})


def test_parts_are_told_as_means_over_the_responses_that_have_them():
    scores = [Score(1.0, {"score": 1.0, "acc": True, "pred": "4", "bonus": 0.5}), Score(0.0, {"acc": False})]
    assert component_means([*scores, Score(None, fault="died")]) == {"reward/acc/mean": 0.5, "reward/bonus/mean": 0.5}


def test_responses_without_an_answer_that_can_be_read_are_counted():
    scores = [Score(0.0, {"pred": pred}) for pred in ("4", "", None, "[INVALID]")]
    assert component_means([*scores, Score(0.0, {"acc": 0.0})])["reward/unparsed"] == 0.75


# Token by token


def test_rewards_of_tokens_add_up_to_the_score_and_are_not_extras():
    score = to_score({"token_rewards": (0.25, 0, 0.5), "acc": 1})
    assert score == Score(0.75, {"acc": 1, "score": 0.75}, token_rewards=[0.25, 0.0, 0.5])
    # A score that says the same may stand next to them.
    assert to_score({"token_rewards": [0.1] * 10, "score": 1.0}).value == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("returned", "fault"),
    [
        ({"token_rewards": [0.5, 0.5], "score": 0.5}, "type"),
        ({"token_rewards": []}, "type"),
        ({"token_rewards": [0.5, "x"]}, "type"),
        ({"token_rewards": [0.5, float("nan")]}, "nan"),
        ({"token_rewards": [10 * LARGEST, -10 * LARGEST]}, "nan"),
        ({"token_rewards": 5}, "raised:TypeError"),
    ],
)
def test_token_rewards_that_are_not_rewards_are_a_fault(returned, fault):
    assert score_request(lambda answer: to_score(returned), ScoringRequest("", "", "", {})).fault == fault


def test_another_value_leaves_the_difference_to_the_last_token():
    assert Score(1.0, token_rewards=[0.5, 0.5]).with_value(0.25).token_rewards == [0.5, -0.25]


def test_a_function_that_names_response_ids_is_given_them(reward_config):
    source = "def compute_score(response_ids): return {'token_rewards': [i / 2 for i in response_ids]}"
    reward = load_reward(reward_config(source))
    assert reward.takes_tokens
    assert reward.score(ScoringRequest("", "", "", {}, [2, 4])).token_rewards == [1.0, 2.0]
    assert not load_reward(reward_config("def compute_score(**given): return 1")).takes_tokens
