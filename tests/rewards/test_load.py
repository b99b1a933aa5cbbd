import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from hybridrl.config import ConfigError
from hybridrl.config.schema_parts import RewardManagerConfig, RewardManagerModuleConfig, Scorer
from hybridrl.required import required
from hybridrl.rewards.load import check_data_sources, load_reward
from hybridrl.rewards.pool import ScorerPool
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


INFO = {"index": 3, "num_turns": 2, "rollout_reward_scores": {}}
GIVEN = {"data_source": "gsm8k", "extra_info": INFO, "ground_truth": "42", "solution_str": "so #### 42"}


@pytest.mark.parametrize(
    ("parameters", "reward_kwargs", "given"),
    [
        ("*, data_source, solution_str, ground_truth, extra_info", {}, GIVEN),
        ("ground_truth, solution_str", {}, {"ground_truth": "42", "solution_str": "so #### 42"}),
        ("**any_keyword", {}, {"any_keyword": GIVEN}),
        ("ground_truth, bonus", {"bonus": 2, "ground_truth": "7"}, {"ground_truth": "7", "bonus": 2}),
    ],
    ids=["all four arguments", "some of them", "any keyword", "reward_kwargs are added and win"],
)
def test_a_function_is_given_the_arguments_it_takes_by_keyword(reward_config, parameters, reward_kwargs, given):
    source = f"def grade({parameters}): return locals()"
    assert returned(reward_config(source, name="grade", **reward_kwargs)) == given


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


@pytest.mark.parametrize(
    ("source", "options", "parts"),
    [
        (None, {"path": "/no/such/reward.py"}, ["reward.custom_reward_function.path=/no/such/reward.py"]),
        ("def helper(): ...\ndef compute_rewards(solution_str): ...\n", {"name": "compute_reward"},
         ["reward.custom_reward_function.name=compute_reward", "compute_rewards, helper"]),
        ("compute_score = 1.0", {}, ["is of type float, not a function"]),
        ("def compute_score(solution_str, tokenizer): ...", {},
         ["(solution_str, tokenizer)", "missing a required argument: 'tokenizer'"]),
        ("def compute_score(solution_str): ...", {"bonus": 2},
         ["'bonus': 2", "unexpected keyword argument 'bonus'"]),
        (None, {"method": "lenient"}, ["reward.custom_reward_function", "method"]),
        (None, {"mehtod": "strict"}, ["reward.custom_reward_function", "mehtod"]),
    ],
    ids=["a missing file", "a missing function, the nearest name first",
         "no function", "a parameter that nothing fills", "a reward_kwarg that the function does not take",
         "a wrong value of an option of a built-in scorer", "a wrong name of such an option"],
)  # fmt: skip
def test_what_cannot_be_loaded_is_rejected_by_name(reward_config, source, options, parts):
    message = rejection(reward_config(source, **options))
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("source", "what", "line"),
    [
        ("import json\nimport no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'", 2),
        ("import json\n\njson.loads('{')\n", "JSONDecodeError", 3),
        ("x = 1\ndef compute_score(:\n", "SyntaxError", 2),
        ("import sys\nsys.exit('usage')\n", "SystemExit: usage", 2),
    ],
)
def test_a_file_that_does_not_import_is_rejected_with_its_error_and_line(reward_config, tmp_path, source, what, line):
    message = rejection(reward_config(source))
    assert what in message and f"({tmp_path / 'my_reward.py'}:{line})" in message


def test_a_package_that_does_not_exist_is_rejected(reward_config):
    path = "reward.custom_reward_function.path=pkg://no_such_package.reward"
    error = "ModuleNotFoundError: No module named 'no_such_package'"
    assert rejection(reward_config(path="pkg://no_such_package.reward")) == f"{path} does not import: {error}"


@pytest.mark.parametrize("data_source", ["openai/gsm8k", "gsm8k"])
def test_without_a_path_the_scorer_is_chosen_by_data_source(reward_config, data_source):
    answers = [ScoringRequest(data_source, text, "42", {}) for text in ("#### 42", "42")]
    assert [returned(reward_config(), answer) for answer in answers] == [1.0, 0.0]


def test_a_named_scorer_scores_rows_of_any_data_source_and_extracts_the_number_of_a_solution(reward_config):
    config = reward_config(more={"name": "gsm8k"}, score=2.0)
    solution = "She sold 48/2 = <<48/2=24>>24 clips in May.\n#### 1,072"
    answers = [ScoringRequest(source, "#### 1072", solution, {}) for source in ("unknown", "math", "poems")]
    assert [returned(config, answer) for answer in answers] == [2.0] * 3
    with pytest.raises(ConfigError, match=r"have no such option; they have .*format_score"):
        load_reward(reward_config(more={"name": "gsm8k"}, seconds=1), ["openai_humaneval"])


def test_every_built_in_scorer_can_be_named(reward_config):
    for name in get_args(Scorer):
        assert load_reward(reward_config(more={"name": name})).main is not None


def test_without_task_rewards_rows_of_data_that_have_a_scorer_keep_it_and_others_have_no_component(reward_config):
    config = reward_config(more={"name": "none"})
    assert returned(config) == 1.0 and returned(config, ScoringRequest("chat", "hello", None, {})) == {"score": 0.0}


def test_options_reach_the_built_in_scorer(reward_config):
    config = reward_config(method="flexible", format_score=0.25)
    assert [returned(config, ScoringRequest("gsm8k", answer, "42", {})) for answer in ("42", "41")] == [1.0, 0.25]


def test_unknown_data_sources_are_rejected_with_the_known_ones_and_the_way_out():
    check_data_sources(["gsm8k", "openai/gsm8k"])
    with pytest.raises(ConfigError) as raised:
        check_data_sources(["gsm8k", "poems", "poems"])
    check_data_sources(["poems", "unknown"], "gsm8k")
    with pytest.raises(ConfigError, match=r"the rows have no data source .*; set reward.name to one of gsm8k, "):
        check_data_sources(["unknown"])
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


CHANGES = """
def spoil(value):
    if isinstance(value, dict):
        [spoil(item) for item in value.values()]
        value["added"] = value.get("added", 0) + 1
    elif isinstance(value, list):
        value.append(len(value))
    return str(value)
def compute_score(ground_truth, extra_info, response_ids=None, options=None):
    return {"score": 1.0, "seen": [spoil(value) for value in (ground_truth, extra_info, response_ids, options)]}
def together(ground_truths, extra_infos):
    return [{"score": 1.0, "seen": [spoil(truth), spoil(extra)]} for truth, extra in zip(ground_truths, extra_infos)]
def manager(compute_score, ground_truth, extra_info):
    return compute_score(ground_truth=ground_truth, extra_info=extra_info)
"""


@pytest.mark.parametrize("kind", ["alone", "several", "together", "manager"])
def test_what_a_reward_gets_is_its_own(reward_config, tmp_path, kind):
    more, options = {}, {"options": {"deep": [1, {"more": []}]}}
    if kind == "several":
        more = {"functions": {"again": str(tmp_path / "my_reward.py")}}
    elif kind == "manager":
        module = RewardManagerModuleConfig(str(tmp_path / "my_reward.py"), "manager")
        more = {"reward_manager": RewardManagerConfig("importlib", "manager", module)}
    name, manager, given = ("together", "batch", {}) if kind == "together" else ("compute_score", "naive", options)
    config = reward_config(CHANGES, name=name, manager=manager, num_workers=0, more=more, **given)
    truth, extra, ids = {"target": [1]}, {"nested": {"list": [1]}, "list": [{}]}, [5, 6]
    requests = [ScoringRequest("test", "x", truth, extra, ids) for _ in range(8)]  # of one row, as in a run
    with ScorerPool(config) as pool:
        seen = [future.result(20).extras["seen"] for future in pool.submit(requests)]
    assert seen == [seen[0]] * 8 and "'added': 1" in str(seen[0])
    assert (truth, extra, ids) == ({"target": [1]}, {"nested": {"list": [1]}, "list": [{}]}, [5, 6])
    assert options == {"options": {"deep": [1, {"more": []}]}}


LOOPS = """
import asyncio, sys
sys.setswitchinterval(1e-6)
async def compute_score(): return {"score": 1.0, "loop": id(asyncio.get_running_loop())}
"""


def test_coroutines_that_begin_at_the_same_time_have_one_event_loop(reward_config):
    with ScorerPool(reward_config(LOOPS)) as pool:
        scores = [future.result(20) for future in pool.submit([ScoringRequest("test", "x", "", {})] * 128)]
    assert len({score.extras["loop"] for score in scores}) == 1
