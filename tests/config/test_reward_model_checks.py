"""The reward model of a run: values that are filled in, and what is rejected."""

from pathlib import Path

import pytest

from hybridrl.config import ConfigError
from hybridrl.runs.settings import build_algorithm, rank_model
from tests.config.conftest import Load, errors_of

KEY = "reward.reward_model"
ON = [f"{KEY}.enable=true", f"{KEY}.model_path=model"]
LONG = ["data.max_prompt_length=1000", "data.max_response_length=25"]  # the model has 1024 positions


def test_a_reward_model_is_one_more_frozen_model_of_the_training_ranks(load: Load) -> None:
    tensor = "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=2"
    config = load(*ON, "trainer.n_gpus_per_node=2", tensor, "algorithm.adv_estimator=rloo").config
    assert build_algorithm(config).models == ["actor", "reward_model"]
    entry = rank_model("reward_model", config)
    assert (entry.head, entry.trained, entry.fsdp.tensor_parallel_size) == ("score", None, 1)
    assert entry.model.path == config.reward.reward_model.model_path and entry.model.path.startswith("/")
    assert entry.budget.devices == 1 and rank_model("actor", config).budget.devices == 2


@pytest.mark.parametrize("prefix", [KEY, "reward_model"])
def test_keys_of_an_engine_and_a_pool_have_no_effect(load: Load, prefix: str) -> None:
    keys = ["rollout.name=vllm", "rollout.gpu_memory_utilization=0.8", "enable_resource_pool=True", "n_gpus_per_node=4"]
    loaded = load(*ON, *(f"{prefix}.{key}" for key in keys))
    (note,) = [note for note in loaded.notes if "needs no engine and no pool" in note]
    assert f"{prefix}.rollout.name" in note and loaded.config.reward.reward_model.enable


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (ON[:1], f"no model is named; set {KEY}.model_path"),
        ([*ON, f"{KEY}.truncation=right"], "error | left"),
        ([*ON, "algorithm.filter_groups.enable=true"], "set algorithm.filter_groups.enable=false"),
        ([*ON, "+reward.weights.reward_model=1"], f"set its weight by {KEY}.weight"),
        ([*ON, *LONG], f"or set {KEY}.truncation=left"),
        ([*ON, *LONG], f"{KEY}.model_path=model: the model takes 1024 positions"),
        ([*ON, f"{KEY}.modelpath=other"], f"unknown key {KEY}.modelpath; nearest: {KEY}.model_path"),
    ],
)
def test_what_cannot_score_is_rejected_with_the_fix(load: Load, overrides: list[str], error: str) -> None:
    found = errors_of(load, *overrides)
    assert any(error in line for line in found), found


def test_a_conversation_that_may_be_too_long_is_accepted_if_it_is_shortened(load: Load) -> None:
    with pytest.raises(ConfigError, match="the model takes 1024 positions"):
        load(*LONG)  # the policy's own
    assert errors_of(load, *ON, *LONG, f"{KEY}.truncation=left") == errors_of(load, *LONG)


def test_an_estimator_that_samples_greedily_afterwards_is_rejected(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"adv_estimator=remax samples a greedy .* set algorithm.adv_estimator=rloo"):
        build_algorithm(load(*ON, "algorithm.adv_estimator=remax").config)


def test_a_path_without_the_switch_has_no_effect(load: Load) -> None:
    assert any(f"has no effect without {KEY}.enable=true" in note for note in load(ON[1]).notes)


# -- verl's generative reward models: a custom function calls the server -----------------------------------------------

URL = "reward.judge.base_url=http://127.0.0.1:8001/v1"


def write(path: Path, parameters: str) -> str:
    names = "data_source, solution_str, ground_truth, extra_info"
    (path / "generative.py").write_text(f"import absent\n\nasync def compute_score({names}, {parameters}): ...\n")
    return f"custom_reward_function.path={path}/generative.py"


@pytest.mark.parametrize("key", [KEY, "reward_model"])
@pytest.mark.parametrize(
    "parameters",
    [
        "reward_router_address, reward_model_tokenizer=None",
        "reward_router_address, reward_model_tokenizer",
        "*, reward_router_address",
        "reward_router_address=None",
        "reward_model_tokenizer",
    ],
)
def test_a_generative_reward_model_needs_a_server(load: Load, tmp_path: Path, key: str, parameters: str) -> None:
    named = [f"{key}.enable=true", f"{key}.{'model_path' if key == KEY else 'model.path'}=model"]
    function = write(tmp_path, parameters)
    (error,) = errors_of(load, *named, function)
    assert error.endswith(
        "; start it: hybridrl serve model.path=model port=8001, and set reward.judge.base_url=http://127.0.0.1:8001/v1"
    ), error
    loaded = load(*named, function, URL, "algorithm.adv_estimator=rloo", "algorithm.filter_groups.enable=true")
    assert build_algorithm(loaded.config).models == ["actor"]  # the ranks load nothing
    assert not loaded.config.reward.judged and loaded.config.reward.timeout == 60
    (note,) = [note for note in loaded.notes if note.startswith(f"{KEY}.enable: ")]
    assert note == f"{KEY}.enable: the custom function calls its server, so the training ranks load no reward model"


def test_a_function_without_its_server_or_model_is_rejected(load: Load, tmp_path: Path) -> None:
    function = write(tmp_path, "reward_router_address, reward_model_tokenizer")
    errors = errors_of(load, function)
    assert any("start it: hybridrl serve model.path=... port=8001" in error for error in errors)
    assert any(f"set {KEY}.model_path" in error or "set it to the model" in error for error in errors), errors
    assert load(write(tmp_path, "reward_router_address=None")).config.reward.judge.base_url is None


def test_a_function_of_a_reward_model_in_the_ranks_names_no_server(load: Load, tmp_path: Path) -> None:
    config = load(*ON, write(tmp_path, "bonus=1")).config
    assert config.reward.reward_model.enable and build_algorithm(config).models == ["actor", "critic", "reward_model"]


def test_a_judge_scores_next_to_such_a_function_only_with_a_weight(load: Load, tmp_path: Path) -> None:
    function, judge = write(tmp_path, "reward_router_address"), [URL, "reward.judge.model=critic"]
    assert not load(function, *judge).config.reward.judged
    assert load(function, *judge, "+reward.weights={judge:1}").config.reward.judged
    assert load(*judge).config.reward.judged
