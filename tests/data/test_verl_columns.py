"""The columns that verl documents for its rows: each has an effect here, is passed on, or is rejected by its name."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config.findings import ConfigError
from hybridrl.data.conversations import load_conversations
from hybridrl.data.prompts import PromptDataset, load_prompts

from .conftest import OPTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
USER = [{"role": "user", "content": "q"}]
ROW = {"data_source": "s", "prompt": USER, "reward_model": {"style": "rule", "ground_truth": "4"}}
TEMPLATE = (
    "{{ 'quiet;' if enable_thinking is false }}{% for t in tools or [] %}{{ t.name ~ ';' }}{% endfor %}"
    "{% for m in messages %}{{ m.content ~ ';' }}{% endfor %}"
)
REJECTED = "REJECTED"
# Each column with a value, how its effect is read off the loaded prompts, and the effect.
RL: dict[str, tuple[Any, Callable[[PromptDataset], Any], Any]] = {
    "data_source": ("openai/gsm8k", lambda data: data[0].data_source, "openai/gsm8k"),
    "prompt": ([{"role": "user", "content": "other"}], lambda data: data[0].messages[0]["content"], "other"),
    "ability": ("math", lambda data: data[0].columns["ability"], "math"),
    "reward_model.ground_truth": ("5", lambda data: data[0].ground_truth, "5"),
    "reward_model.style": ("model", lambda data: data[0].columns["reward_model"]["style"], "model"),
    "extra_info.split": ("test", lambda data: data[0].extra_info["split"], "test"),
    "extra_info.index": (3, lambda data: data[0].extra_info["index"], 3),
    "extra_info.need_tools_kwargs": (True, lambda data: data[0].extra_info["need_tools_kwargs"], True),
    "extra_info.tools_kwargs": ({"add": {"create_kwargs": {"x": 1}}}, lambda data: data.fields, {"tools_kwargs"}),
    "extra_info.interaction_kwargs": ({"name": "a"}, lambda data: data.fields, {"interaction_kwargs"}),
    "extra_info.tool_selection": (["add"], lambda data: data.fields, {"tool_selection"}),
    "agent_name": ("tool_agent", lambda data: data.environments, {"tool_agent"}),
    "tools": ([{"name": "add"}], lambda data: len(data[0].ids), len("add;q;")),
    "enable_thinking": (False, lambda data: len(data[0].ids), len("quiet;q;")),
    "images": ([{"bytes": "x"}], REJECTED, "line 1: more than text: the column images"),
    "videos": ([{"bytes": "x"}], REJECTED, "line 1: more than text: the column videos"),
    "audios": ([{"bytes": "x"}], REJECTED, "line 1: more than text: the column audios"),
}
ANSWER = {"role": "assistant", "content": "a"}
SFT: dict[str, tuple[Any, str]] = {
    "messages": ([*USER, ANSWER | {"content": "other"}], "q;other;"),
    "tools": ([{"name": "add"}], "add;q;a;"),
    "enable_thinking": (False, "quiet;q;a;"),
    "prompt": ("p", "p;r;"),
    "response": ("r", "p;r;"),
    "images": ([{"bytes": "x"}], REJECTED),
}


def with_column(row: dict[str, Any], column: str, value: Any) -> dict[str, Any]:
    name, _, inner = column.partition(".")
    return row | {name: {**row.get(name, {}), inner: value} if inner else value}


@pytest.mark.parametrize("column", RL)
def test_a_column_of_a_prompt_has_its_effect(column, write, config, tokenizer):
    value, effect, expected = RL[column]
    tokenizer.chat_template = TEMPLATE
    file = write(with_column(ROW, column, value))
    if effect == REJECTED:
        with pytest.raises(ConfigError, match=re.escape(expected)):
            load_prompts([file], config, tokenizer, **OPTIONS)
        return
    assert effect(load_prompts([file], config, tokenizer, **OPTIONS)) == expected
    without = write(ROW, name="without.jsonl")
    with contextlib.suppress(KeyError):  # what is passed on to rewards and environments is absent then
        assert effect(load_prompts([without], config, tokenizer, **OPTIONS)) != expected


@pytest.mark.parametrize("column", SFT)
def test_a_column_of_a_conversation_has_its_effect(column, write, sft_config, tokenizer):
    value, expected = SFT[column]
    tokenizer.chat_template = TEMPLATE
    row = {"prompt": "p", "response": "r"} if column in ("prompt", "response") else {"messages": [*USER, ANSWER]}
    file = write(row | {column: value})
    if expected == REJECTED:
        with pytest.raises(ConfigError, match=f"line 1: more than text: the column {column}"):
            load_conversations([file], sft_config, tokenizer, **OPTIONS)
        return
    (conversation,) = load_conversations([file], sft_config, tokenizer, **OPTIONS)
    assert tokenizer.decode(conversation.ids) == expected


def test_the_page_has_every_column():
    documented = PAGE + (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    assert [column for column in {*RL, *SFT} if f"`{column}`" not in documented] == []
