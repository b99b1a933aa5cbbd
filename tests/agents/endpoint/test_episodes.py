"""Which runs have episodes of several turns, and what of them is rejected before anything starts."""

import json
from pathlib import Path

import pytest

from hybridrl.agents.endpoint.episodes import episode_limits, runs_episodes
from hybridrl.config import ConfigError, PPOConfig, load_ppo_config
from hybridrl.runs.prepare import prepare
from tests.agents.endpoint.conftest import RECIPE
from tests.agents.environments.conftest import CALLS

REWARD = f"reward.custom_reward_function.path={RECIPE}/reward.py"
MULTI_TURN, MODE = "actor_rollout_ref.rollout.multi_turn", "tokenization_sanity_check_mode"


@pytest.fixture(scope="module")
def data(tiny, tmp_path_factory) -> Path:
    """The rows of a game with the quickstart's untrained model."""
    directory = tmp_path_factory.mktemp("data")
    games = [{"target": number, "low": 1, "high": 31} for number in range(1, 32)]
    row = {"data_source": "quickstart/guess_number", "prompt": [{"role": "user", "content": "?"}]}
    rows = [row | {"reward_model": {"ground_truth": str(game["target"])}, "extra_info": game} for game in games]
    (directory / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (directory / "model").symlink_to(tiny)
    (directory / "tools.jinja").write_text(CALLS)
    return directory


def load(data: Path, *overrides: str) -> PPOConfig:
    fixed = [f"data.train_files={data}/train.jsonl", f"actor_rollout_ref.model.path={data}/model"]
    fixed += ["data.train_batch_size=8", "trainer.total_training_steps=1", "algorithm.adv_estimator=grpo"]
    fixed += [f"trainer.default_local_dir={data}/run", "actor_rollout_ref.rollout.n=2"]
    return load_ppo_config([*fixed, "data.max_prompt_length=32", "data.max_response_length=64", *overrides])


def rejected(data: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        prepare(load(data, *overrides)).rejections.close()
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "rows", "expected"),
    [
        ("actor_rollout_ref.rollout.n=2", (), False),
        ("actor_rollout_ref.rollout.n=2", ("single_turn_agent", "gsm8k"), False),
        ("actor_rollout_ref.rollout.n=2", ("tool_agent",), True),
        (f"{MULTI_TURN}.environment=guess_number", (), True),
        (f"{MULTI_TURN}.tools=[calculator]", (), True),
        (f"{MULTI_TURN}.enable=true", (), True),
    ],
)
def test_a_run_has_episodes_if_a_key_or_a_row_names_more_than_single_responses(data, override, rows, expected):
    assert runs_episodes(load(data, override).actor_rollout_ref.rollout, set(rows)) is expected


def test_the_limits_are_those_of_the_keys(data):
    keys = {"max_assistant_turns": 5, "max_user_turns": 4, "max_assistant_response_length": 16, "tool_timeout": 7}
    config = load(data, *(f"{MULTI_TURN}.{key}={value}" for key, value in keys.items()))
    limits = episode_limits(config.actor_rollout_ref.rollout, 32, pausable=False)
    assert (limits.prompt, limits.response, limits.context) == (32, 64, 96)
    assert (limits.turns, limits.user_turns, limits.turn, limits.call_timeout) == (5, 4, 16, 7)


@pytest.mark.parametrize(
    ("override", "unread"),
    [
        ("actor_rollout_ref.rollout.n=2", "rows have interaction_kwargs, tool_selection, tools_kwargs, which nothing"),
        (f"{MULTI_TURN}.tools=[calculator]", "rows have interaction_kwargs, which nothing reads"),
        (f"{MULTI_TURN}.environment=guess_number", ""),
    ],
)
def test_fields_of_rows_that_their_episodes_do_not_read_are_named(data, tmp_path, caplog, override, unread):
    extra = {"tools_kwargs": {"calculator": {"create_kwargs": {}}}, "interaction_kwargs": {"name": "a"}}
    row = {"prompt": "1+1", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "2"}}
    row |= {"extra_info": extra | {"tool_selection": ["calculator"]}}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    prepare(load(data, f"data.train_files={tmp_path}/rows.jsonl", override))
    assert [unread] * bool(unread) == [
        record.getMessage().partition(": ")[2][: len(unread)] for record in caplog.records if "nothing" in record.msg
    ]


@pytest.mark.parametrize("key", ["actor_rollout_ref.rollout.n=2", f"{MULTI_TURN}.environment=guess_number"])
@pytest.mark.parametrize("files", ["data.train_files", "data.val_files"])
def test_ground_truths_of_null_need_a_custom_reward(data, tmp_path, key, files):
    row = {"prompt": "1+1", "data_source": "openai/gsm8k", "extra_info": {"target": 7, "low": 1, "high": 9}}
    row |= {"reward_model": {"style": "model", "ground_truth": None}}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    keys = (key, f"{files}={tmp_path}/rows.jsonl")
    inputs = prepare(load(data, *keys, REWARD))
    inputs.rejections.close()
    assert [prompt.ground_truth for prompt in inputs.datasets[files]] == [None] * 8
    text = rejected(data, *keys, "reward.custom_reward_function.path=null")
    assert f"{files}: 8 bad rows\n  {tmp_path}/rows.jsonl, line 1: the ground truth is null" in text


def test_an_environment_that_gives_the_rewards_needs_no_reward_function(data):
    inputs = prepare(load(data, f"{MULTI_TURN}.environment=guess_number"))
    inputs.rejections.close()
    assert inputs.datasets and inputs.scored == {}


def test_all_that_is_wrong_with_environments_is_rejected_with_the_fix(data, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("class Game:\n    def reset(self, messages):\n        return messages\n")
    assert "Game has no method step" in rejected(data, f"{MULTI_TURN}.environment={file}:Game")
    assert "there is no environment of this name" in rejected(data, f"{MULTI_TURN}.environment=gess_number")


def test_a_tool_without_a_docstring_is_named(data, tmp_path):
    file = tmp_path / "tools.py"
    file.write_text("def look(word: str) -> str:\n    return word\n")
    template = f"actor_rollout_ref.model.custom_chat_template={data}/tools.jinja"
    message = rejected(data, f"{MULTI_TURN}.function_tool_path={file}", template, REWARD, "data.max_prompt_length=400")
    assert "look" in message and "docstring" in message


def test_a_template_that_does_not_show_the_tools_is_rejected(data):
    message = rejected(data, f"{MULTI_TURN}.tools=[calculator]", REWARD)
    assert "the chat template does not show the tools to the model" in message
    described = [f"{MULTI_TURN}.tools=[calculator]", f"{MULTI_TURN}.{MODE}=disable", REWARD]
    assert not prepare(load(data, *described, f"{MULTI_TURN}.format=hermes")).rejections.errors


def test_a_format_of_calls_that_cannot_be_read_is_rejected(data):
    silent = rejected(data, f"{MULTI_TURN}.tools=[calculator]", f"{MULTI_TURN}.{MODE}=disable", REWARD)
    assert f"{MULTI_TURN}.format=auto" in silent and "its chat template writes no calls" in silent
    unknown = rejected(data, f"{MULTI_TURN}.environment=guess_number", f"{MULTI_TURN}.format=hermse")
    assert f"{MULTI_TURN}.format=hermse: unknown; set it to one of auto" in unknown


LOOPS = """
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import ToolParser

@ToolParser.register("shouted")
class Shouted(ToolParser):
    async def extract_tool_calls(self, responses_ids, tools=None):
        return "", []

class Plain(ToolAgentLoop):
    pass

class Own(ToolAgentLoop):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tool_parser = Shouted(self.tokenizer)
"""


def test_the_formats_of_loops_are_checked_and_a_registered_parser_is_one(data, tmp_path):
    (tmp_path / "loops_of_formats.py").write_text(LOOPS)
    loops = "".join(f"- {{name: {name}, _target_: loops_of_formats.{name}}}\n" for name in ("Plain", "Own"))
    (tmp_path / "agent.yaml").write_text(loops)
    agent = "actor_rollout_ref.rollout.agent"
    keys = [f"{agent}.agent_loop_config_path={tmp_path}/agent.yaml", f"{MULTI_TURN}.{MODE}=disable"]
    keys += [REWARD, f"{MULTI_TURN}.tools=[calculator]"]
    plain, own = (f"{agent}.default_agent_loop={name}" for name in ("Plain", "Own"))
    assert "its chat template writes no calls" in rejected(data, *keys, plain)
    assert not prepare(load(data, *keys, own)).rejections.errors
    assert f"{MULTI_TURN}.format=shooted: unknown" in rejected(data, *keys, own, f"{MULTI_TURN}.format=shooted")
    shouted = f"{MULTI_TURN}.format=shouted"
    assert not prepare(load(data, *keys, plain, shouted)).rejections.errors
    assert "format=shouted is a parser of a file, which only agent loops use" in rejected(data, *keys, shouted)


def test_prompts_that_are_too_long_with_the_tools_are_rejected_with_the_length(data):
    keys = [f"{MULTI_TURN}.tools=[calculator]", f"actor_rollout_ref.model.custom_chat_template={data}/tools.jinja"]
    message = rejected(data, *keys, REWARD)
    assert "data.max_prompt_length=32: 31 of 31 prompts" in message
    needed = message.rsplit("data.max_prompt_length=", 1)[1].split()[0]
    longer = load(data, *keys, REWARD, "data.max_prompt_length=440")
    assert json.loads(needed) <= 440 and not prepare(longer).rejections.errors
