import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import ConfigError
from hybridrl.core.required import required
from hybridrl.rewards.load import check_data_sources, load_reward
from hybridrl.rewards.score import ScoringRequest

ANSWER = ScoringRequest("gsm8k", "so #### 42", "42", {"index": 3})


def returned(config, answer: ScoringRequest = ANSWER) -> Any:
    """Return what the configured function returns."""
    main = load_reward(config, ["gsm8k"]).main
    assert main is not None
    return main(answer)


@pytest.mark.parametrize("form", ["{file}", "file://{file}"])
def test_the_file_is_found_by_path_and_by_url(reward_config, tmp_path, form):
    source = "def compute_score(**given): return 0.25"
    assert returned(reward_config(source, path=form.format(file=tmp_path / "my_reward.py"))) == 0.25


def test_a_module_is_found_by_pkg_and_its_dotted_name(reward_config):
    assert returned(reward_config(path="pkg://hybridrl.rewards.scorers.short_answers", name="score_gsm8k")) == 1.0


def test_all_four_arguments_arrive_by_keyword(reward_config):
    source = """
def compute_score(*, data_source, solution_str, ground_truth, extra_info):
    return [data_source, solution_str, ground_truth, extra_info]
"""
    extra_info = {"index": 3, "num_turns": 2, "rollout_reward_scores": {}}
    assert returned(reward_config(source)) == ["gsm8k", "so #### 42", "42", extra_info]


def test_a_function_is_given_only_the_arguments_it_takes(reward_config):
    source = "def grade(ground_truth, solution_str): return [ground_truth, solution_str]"
    assert returned(reward_config(source, name="grade")) == ["42", "so #### 42"]


def test_a_function_that_takes_any_keyword_is_given_all(reward_config):
    source = "def compute_score(**given): return sorted(given)"
    names = ["data_source", "extra_info", "ground_truth", "solution_str"]
    assert returned(reward_config(source)) == names


def test_reward_kwargs_are_added_and_win(reward_config):
    source = "def compute_score(solution_str, ground_truth, bonus): return [ground_truth, bonus]"
    assert returned(reward_config(source, bonus=2, ground_truth="7")) == ["7", 2]


ASYNC_SOURCE = """
import asyncio
async def compute_score(solution_str, ground_truth):
    await asyncio.sleep(0)
    return id(asyncio.get_running_loop())
"""


def test_an_async_function_keeps_its_event_loop_from_call_to_call(reward_config):
    main = required(load_reward(reward_config(ASYNC_SOURCE)).main)
    assert main(ANSWER) == main(ANSWER)


async def test_an_async_function_can_be_called_while_the_caller_runs_a_loop(reward_config):
    assert isinstance(returned(reward_config(ASYNC_SOURCE)), int)


def test_files_beside_the_reward_file_can_be_imported(reward_config, tmp_path):
    (tmp_path / "my_reward_helper.py").write_text("HALF = 0.5")
    source = "from my_reward_helper import HALF\ndef compute_score(solution_str): return HALF"
    assert returned(reward_config(source)) == 0.5


def rejection(config) -> str:
    with pytest.raises(ConfigError) as raised:
        load_reward(config, ["gsm8k"])
    return str(raised.value)


def test_a_missing_file_is_rejected(reward_config):
    message = rejection(reward_config(path="/no/such/reward.py"))
    assert "reward.custom_reward_function.path=/no/such/reward.py" in message


@pytest.mark.parametrize(
    ("source", "what", "line"),
    [
        ("import json\nimport no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'", 2),
        ("import json\n\njson.loads('{')\n", "JSONDecodeError", 3),
        ("x = 1\ndef compute_score(:\n", "SyntaxError", 2),
        ("import sys\nsys.exit('usage')\n", "SystemExit: usage", 2),
    ],
)
def test_a_file_that_does_not_import_is_rejected_with_its_own_error_and_line(
    reward_config, tmp_path, source, what, line
):
    message = rejection(reward_config(source))
    assert what in message and f"({tmp_path / 'my_reward.py'}:{line})" in message


def test_a_package_that_does_not_exist_is_rejected(reward_config):
    message = rejection(reward_config(path="pkg://no_such_package.reward"))
    assert message == (
        "reward.custom_reward_function.path=pkg://no_such_package.reward does not import: "
        "ModuleNotFoundError: No module named 'no_such_package'"
    )


def test_a_missing_function_is_rejected_with_the_nearest_name_first(reward_config):
    source = "def helper(): ...\ndef compute_rewards(solution_str): ...\n"
    message = rejection(reward_config(source, name="compute_reward"))
    assert "reward.custom_reward_function.name=compute_reward" in message
    assert "compute_rewards, helper" in message


def test_a_name_that_is_not_a_function_is_rejected(reward_config):
    assert "is of type float, not a function" in rejection(reward_config("compute_score = 1.0"))


def test_a_parameter_that_nothing_fills_is_rejected(reward_config):
    message = rejection(reward_config("def compute_score(solution_str, tokenizer): ..."))
    assert "(solution_str, tokenizer)" in message and "missing a required argument: 'tokenizer'" in message


def test_a_reward_kwarg_that_the_function_does_not_take_is_rejected(reward_config):
    message = rejection(reward_config("def compute_score(solution_str): ...", bonus=2))
    assert "'bonus': 2" in message and "unexpected keyword argument 'bonus'" in message


@pytest.mark.parametrize("data_source", ["openai/gsm8k", "gsm8k"])
def test_without_a_path_the_scorer_is_chosen_by_data_source(reward_config, data_source):
    answers = [ScoringRequest(data_source, text, "42", {}) for text in ("#### 42", "42")]
    assert [returned(reward_config(), answer) for answer in answers] == [1.0, 0.0]


def test_options_reach_the_built_in_scorer(reward_config):
    config = reward_config(method="flexible", format_score=0.25)
    assert [returned(config, ScoringRequest("gsm8k", answer, "42", {})) for answer in ("42", "41")] == [1.0, 0.25]


@pytest.mark.parametrize("option", [{"method": "lenient"}, {"mehtod": "strict"}])
def test_a_wrong_option_of_a_built_in_scorer_is_rejected(reward_config, option):
    message = rejection(reward_config(**option))
    assert "reward.custom_reward_function" in message and next(iter(option)) in message


def test_unknown_data_sources_are_rejected_with_the_known_ones_and_the_way_out():
    check_data_sources(["gsm8k", "openai/gsm8k"])
    with pytest.raises(ConfigError) as raised:
        check_data_sources(["gsm8k", "poems", "poems"])
    for part in ("data_source poems", "openai/gsm8k, gsm8k", "numina_*", "reward.custom_reward_function.path"):
        assert part in str(raised.value)


def test_a_scoring_process_imports_no_heavy_library():
    code = (
        "import sys, hybridrl.rewards.load, hybridrl.rewards.process, hybridrl.rewards.score;"
        "print({'torch', 'transformers', 'ray', 'vllm', 'numpy'} & set(sys.modules))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "set()"
