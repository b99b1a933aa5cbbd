"""The configuration of an evaluation: what it takes from a training command, and what is rejected before the start."""

import json
from pathlib import Path

import pytest

from hybridrl.config import ConfigError, EvaluationConfig, load_ppo_config
from hybridrl.config.compose import as_yaml, save_config
from hybridrl.evaluation.config import describe_sampling, load_eval_config, with_model

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture
def place(needed: list[str], tmp_path: Path) -> Path:
    (tmp_path / "val.jsonl").write_text("{}\n")
    return tmp_path


def load(*overrides: str) -> EvaluationConfig:
    return load_eval_config([*overrides], report=lambda _: None, show=lambda _: None)


def rejected(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(*overrides)
    return str(error.value)


def test_a_training_command_is_an_evaluation_of_its_model_on_its_validation_rows(place, needed):
    training = [
        *needed,
        "data.val_files=val.jsonl",
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.strategy=fsdp2",
    ]
    config = load(*training)
    assert (config.eval.files, config.eval.models) == (["val.jsonl"], ["model"])
    assert load_ppo_config(training).eval.files == []  # which main_ppo does not read


def test_a_configuration_that_was_written_can_be_loaded_again(place):
    written = load("eval.files=val.jsonl", "eval.models=model", "data.max_response_length=7")
    save_config(as_yaml(written), place / "again.yaml")
    again = load_eval_config([], config_name="again", config_dir=place, report=lambda _: None, show=lambda _: None)
    assert again == written


def test_training_files_and_batch_sizes_are_not_needed(place):
    config = load("eval.files=val.jsonl", "eval.models=model", "data.train_batch_size=7", f"{ROLLOUT}.n=3")
    assert config.eval.models == ["model"]


@pytest.mark.parametrize(
    ("overrides", "sampling"),
    [
        (["eval.preset=deepseek"], "preset deepseek: temperature=0.6 top_p=0.95 top_k=-1 max_tokens=32768"),
        (["eval.preset=qwen3-thinking"], "preset qwen3-thinking: temperature=0.6 top_p=0.95 top_k=20 max_tokens=38912"),
        (["eval.preset=dapo"], "preset dapo: temperature=1 top_p=0.7 top_k=-1 max_tokens=512"),
        (["eval.preset=greedy"], "preset greedy: temperature=0 max_tokens=512"),
        ([], "sampling: temperature=0.5 top_p=0.9 top_k=-1 max_tokens=512"),
        (["eval.preset=dapo", "eval.temperature=0.8"], "preset dapo: temperature=0.8 top_p=0.7"),
        (["eval.preset=deepseek", "eval.max_tokens=99"], "max_tokens=99"),
    ],
)
def test_keys_of_eval_win_over_a_preset_and_that_over_the_command(place, overrides, sampling):
    command = [f"{ROLLOUT}.val_kwargs.temperature=0.5", f"{ROLLOUT}.val_kwargs.top_p=0.9"]
    config = load("eval.files=val.jsonl", "eval.models=model", *command, *overrides)
    assert sampling in describe_sampling(config.eval, config.actor_rollout_ref.rollout)


def test_the_longest_response_of_a_preset_is_that_of_the_engine(place):
    config = load("eval.files=val.jsonl", "eval.models=model", "eval.max_tokens=99", "data.max_prompt_length=10")
    assert (config.data.max_response_length, config.actor_rollout_ref.rollout.max_model_len) == (99, 109)


def test_a_models_own_settings_are_checked_for_each_model(place):
    config = load("eval.files=val.jsonl", "eval.models=model", "eval.preset=deepseek")
    with pytest.raises(ConfigError, match=r"1024.*eval\.max_tokens"):  # its positions; the preset sets the length
        with_model(config, "model")
    with pytest.raises(ConfigError, match=r"eval\.compare=/no/model: there is no such directory"):
        with_model(config, "/no/model", "eval.compare")
    engine = with_model(load("eval.files=val.jsonl", "eval.models=model"), "model").actor_rollout_ref.rollout
    assert engine.engine_kwargs.vllm["load_format"] == "auto" and not engine.free_cache_engine


def test_messages_name_the_length_that_the_evaluation_sets(place):
    command = ["eval.files=val.jsonl", "eval.models=model", "eval.max_tokens=50"]
    text = rejected(*command, f"{ROLLOUT}.min_tokens=60", f"{ROLLOUT}.max_model_len=99")
    assert "min_tokens=60: a response has at most 50 tokens" in text
    assert "may have 562 tokens; lower data.max_prompt_length or eval.max_tokens, or leave" in text
    assert load(*command).reward.reward_kwargs.max_resp_len == 50


def test_an_engines_type_is_that_of_the_model_that_is_evaluated(place):
    (place / "model" / "config.json").write_text(json.dumps({"linear_num_value_heads": 2}))
    config = load("eval.files=val.jsonl", "eval.models=model", "trainer.device=cpu")
    assert with_model(config, "model").actor_rollout_ref.rollout.dtype == "bfloat16"


def test_what_only_training_reads_is_not_checked(place):
    training = ["algorithm.gamma=high", "critic.model.path=/no/model", "data.train_files=none.jsonl"]
    load("eval.files=val.jsonl", "eval.models=model", *training)
    assert "unknown key algorithm.gama" in rejected("eval.files=val.jsonl", "eval.models=model", "algorithm.gama=1")


def test_the_names_of_verls_main_eval_are_read(place):
    (place / "reward.py").write_text("def compute_score(solution_str): return 1.0\n")
    config = load(
        "data.path=val.jsonl",
        "data.response_key=answers",
        "data.reward_model_key=truth",
        "data.data_source_key=source",
        "custom_reward_function.path=reward.py",
    )
    assert (config.eval.responses, config.eval.response_key) == (["val.jsonl"], "answers")
    assert (config.eval.reward_model_key, config.data.reward_fn_key) == ("truth", "source")
    assert config.reward.custom_reward_function.path == "reward.py"


def test_an_adapter_of_the_command_is_what_is_evaluated(place, needed):
    adapter = place / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]})
    )
    lora = ["actor_rollout_ref.model.lora_rank=8", f"actor_rollout_ref.model.lora_adapter_path={adapter}"]
    config = load(*needed, "eval.files=val.jsonl", *lora)
    assert config.eval.models == [str(adapter)] and config.actor_rollout_ref.model.lora_rank == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["eval.models=model"], "eval.files and data.val_files are not set; add eval.files"),
        (["eval.files=val.jsonl"], "eval.models: no model is named; add actor_rollout_ref.model.path"),
        (["eval.files=none.jsonl", "eval.models=model"], "there is no file none.jsonl"),
        (["eval.files=val.jsonl", "eval.models=model", "eval.preset=deepsek"], "choose deepseek | qwen3-thinking"),
        (["eval.files=val.jsonl", "eval.models=model", "eval.n=4"], "at temperature 0 all 4 responses"),
        (["eval.files=val.jsonl", "eval.models=model", "eval.preset=dapo", "eval.n=4", "eval.k=[1,8]"], "set eval.n=8"),
        (["eval.files=val.jsonl", "eval.models=model", "eval.k=[1,8]"], "and at temperature 0 there is one"),
        (["eval.fils=val.jsonl"], "nearest: eval.files"),
        (["eval.files=val.jsonl", "eval.models=model", "reward.num_workers=-1"], "reward.num_workers"),
    ],
)
def test_what_cannot_work_is_rejected_with_its_fix(place, overrides, message):
    assert message in rejected(*overrides)


def test_all_that_is_wrong_is_reported_at_once(place):
    text = rejected("eval.preset=none", "eval.n=0", "data.max_prompt_length=0")
    assert all(key in text for key in ("eval.preset", "eval.n", "data.max_prompt_length"))


def test_a_model_that_the_command_names_is_known_as_such_even_if_it_is_no_directory(place, needed):
    config = load("eval.files=val.jsonl", "actor_rollout_ref.model.path=/no/model")
    assert config.eval.models == [config.actor_rollout_ref.model.path] == ["/no/model"]
    assert load("eval.files=val.jsonl", "eval.models=model").actor_rollout_ref.model.path != "model"


def test_a_reward_model_is_rejected_unless_a_custom_function_calls_its_server(place):
    keys = ["eval.files=val.jsonl", "eval.models=model", "reward_model.enable=true", "reward_model.model.path=model"]
    (place / "critic.py").write_text("async def compute_score(solution_str, reward_router_address): ...\n")
    assert "an evaluation has none; set reward.reward_model.enable=false" in rejected(*keys)
    keys.append("reward.custom_reward_function.path=critic.py")
    assert "start it: hybridrl serve model.path=model port=8001" in rejected(*keys)
    assert not load(*keys, "reward.judge.base_url=http://127.0.0.1:8001/v1").reward.judged
