"""Arguments of the chat template: of the configuration, and those that a row has."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from transformers import Qwen2Tokenizer

from hybridrl.agents.environments.dialogue import Dialogue
from hybridrl.config.findings import ConfigError
from hybridrl.config.schema import DataConfig, SFTDataConfig
from hybridrl.data.conversations import load_conversations
from hybridrl.data.prompts import load_prompts

from .conftest import OPTIONS
from .test_conversations import chat

Write = Callable[..., str]
THINKS = (
    "{% for m in messages %}{{ m.role ~ ':' ~ m.content ~ ';' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<quiet>' }}{% endif %}{% endif %}"
)


def prompt(text: str = "a", **columns: Any) -> dict[str, Any]:
    return {"data_source": "s", "prompt": text, "reward_model": {"ground_truth": "4"}, **columns}


@pytest.fixture(params=["rl", "sft"])
def load(request: Any, write: Write, config: DataConfig, sft_config: SFTDataConfig) -> Callable[..., list[str]]:
    """Load rows of either training with these arguments, and return the texts of the prompts or conversations."""

    def texts(tokenizer: Qwen2Tokenizer, arguments: dict[str, Any], *columns: dict[str, Any]) -> list[str]:
        if request.param == "rl":
            file = write(*(prompt(**own) for own in columns or [{}]))
            section = replace(config, apply_chat_template_kwargs=arguments)
            return [tokenizer.decode(one.ids) for one in load_prompts([file], section, tokenizer, **OPTIONS)]
        file = write(*(chat("a", "b", **own) for own in columns or [{}]))
        section = replace(sft_config, apply_chat_template_kwargs=arguments)
        return [tokenizer.decode(one.ids) for one in load_conversations([file], section, tokenizer, **OPTIONS)]

    return texts


def rejection(load: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(ConfigError) as error:
        load(*arguments)
    return str(error.value)


def test_a_name_that_the_template_never_reads_is_rejected_with_those_that_it_reads(load, tokenizer):
    tokenizer.chat_template = "{# thinking #}{% set ns = namespace(last=documents) %}" + THINKS
    message = rejection(load, tokenizer, {"enable_thinkin": False, "thinking": True, "assistant": 1, "last": 2})
    reads = "it reads documents, enable_thinking"
    assert (
        f"data.apply_chat_template_kwargs.enable_thinkin: the chat template does not read enable_thinkin; {reads}"
        in (message)
    )
    assert "set data.apply_chat_template_kwargs.enable_thinking?" in message
    for name in ("thinking", "assistant", "last"):  # in a comment, in a text, of a namespace
        assert f"does not read {name};" in message


@pytest.mark.parametrize(
    "name",
    ["add_generation_prompt", "tokenize", "tools", "messages", "return_dict", "continue_final_message", "conversation",
     "chat_template", "padding"],
)  # fmt: skip
def test_what_the_run_sets_itself_is_rejected_by_its_key(load, tokenizer, name):
    tokenizer.chat_template = THINKS
    message = rejection(load, tokenizer, {name: True})
    assert message.startswith(f"data.apply_chat_template_kwargs.{name}: the run sets {name} itself; ")
    assert ("custom_chat_template" in message, "data.tools_key" in message) == (
        name == "chat_template",
        name == "tools",
    )


@pytest.mark.parametrize(
    "template",
    [
        {"default": "{{ messages[0].content }}", "tool_use": "{{ style }}"},
        "{% macro say(m) %}{{ style ~ m.content }}{% endmacro %}{{ say(messages[0]) }}",
        "{% for m in messages %}{% generation %}{{ style }}{% endgeneration %}{% continue %}{% endfor %}",
        "{% if style is not defined %}{% set style = 1 %}{% endif %}{{ messages[0].content }}",
        "{% set style = style | default('a') %}{{ messages[0].content }}",
        "{% set content = 1 %}{% if tools %}{% set content = 2 %}{% endif %}{{ content ~ style }}",
        "{% macro say(style) %}{{ style }}{% endmacro %}{{ say(1) ~ style }}",
        "{% if tools %}{% set style = 1 %}{% endif %}{{ style is defined }}",
        "{% for style in messages %}{{ style.role }}{% endfor %}{{ style }}",
    ],
    ids=[
        "of one form",
        "in a macro",
        "within tags of transformers",
        "with a default",
        "assigned to itself",
        "next to a variable",
        "also as a macro's parameter",
        "unless a branch assigns it",
        "after a loop",
    ],
)
def test_what_any_part_of_a_template_reads_is_accepted(template, write, config, tokenizer):
    tokenizer.chat_template = template
    for name, accepted in {"style": True, "content": False, "say": False}.items():
        section = replace(config, apply_chat_template_kwargs={name: "x"})
        try:
            load_prompts([write(prompt())], section, tokenizer, **OPTIONS)
        except ConfigError as error:
            assert not accepted and f"does not read {name}" in str(error)
        else:
            assert accepted


def test_a_template_that_is_code_may_read_any_name(write, config, tokenizer):
    class Coded(Qwen2Tokenizer):
        def apply_chat_template(self, conversation: Any, **options: Any) -> list[list[int]]:
            return [[options["style"]] for _ in conversation]

    tokenizer = Coded(vocab={"a": 0, "b": 1}, merges=[])
    tokenizer.chat_template = "-"
    section = replace(config, apply_chat_template_kwargs={"style": 1})
    (only,) = load_prompts([write(prompt())], section, tokenizer, **OPTIONS)
    assert only.ids == [1]
    section = replace(config, apply_chat_template_kwargs={"tokenize": False})
    assert "the run sets tokenize itself" in rejection(lambda: load_prompts([], section, tokenizer, **OPTIONS))


def test_without_a_template_there_is_nothing_that_reads_them(write, config, plain_tokenizer):
    section = replace(config, apply_chat_template_kwargs={"enable_thinking": False})
    message = rejection(lambda: load_prompts([write(prompt())], section, plain_tokenizer, **OPTIONS))
    assert "data.apply_chat_template_kwargs.enable_thinking: there is no chat template" in message


def test_the_column_enable_thinking_is_that_of_its_row(write, config, tokenizer):
    tokenizer.chat_template = THINKS
    rows = [{"enable_thinking": False}, {}, {"enable_thinking": True}, {"enable_thinking": None}]
    file = write(*(prompt(str(number), **row) for number, row in enumerate(rows)))
    texts = [tokenizer.decode(one.ids) for one in load_prompts([file], config, tokenizer, **OPTIONS)]
    assert texts == ["user:0;assistant:<quiet>", "user:1;assistant:", "user:2;assistant:", "user:3;assistant:"]
    config = replace(config, apply_chat_template_kwargs={"enable_thinking": False})  # of all rows that have none
    texts = [tokenizer.decode(one.ids) for one in load_prompts([file], config, tokenizer, **OPTIONS)]
    assert [text.endswith("<quiet>") for text in texts] == [True, True, False, True]


def test_rows_with_equal_arguments_and_tools_are_rendered_in_one_call(write, config, tokenizer, tmp_path):
    calls = []

    class Counting(Qwen2Tokenizer):
        def apply_chat_template(self, chats, **options):
            calls.append(len(chats))
            return super().apply_chat_template(chats, **options)

    tokenizer.save_pretrained(tmp_path)
    tokenizer = Counting.from_pretrained(tmp_path)
    tokenizer.chat_template = THINKS + "{{ tools }}"
    kinds = [{"enable_thinking": False}, {}, {"tools": [{"name": "add"}]}]
    load_prompts([write(*(prompt(str(n), **kinds[n % 3]) for n in range(30)))], config, tokenizer, **OPTIONS)
    assert calls == [10, 10, 10]


def test_the_column_holds_for_conversations_that_are_replayed_too(write, sft_config, tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role ~ ':' }}"
        "{% if loop.last and m.role == 'assistant' and not enable_thinking %}{{ '<quiet>' }}{% endif %}"
        "{{ m.content ~ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    file = write(chat("q", "r", "s", "t", enable_thinking=False), chat("q", "r", "s", "t", enable_thinking=True))
    replay = Dialogue(tokenizer, [tokenizer.eos_token_id]).replay
    quiet, loud = load_conversations([file], sft_config, tokenizer, **OPTIONS, replay=replay)
    end = "<|im_end|>"
    assert tokenizer.decode(loud.ids) == f"user:q{end}assistant:r{end}user:s{end}assistant:t{end}"
    assert tokenizer.decode(quiet.ids) == f"user:q{end}assistant:<quiet>r{end}user:s{end}assistant:<quiet>t{end}"


def test_a_column_that_the_template_does_not_read_is_named_once(load, tokenizer, caplog):
    caplog.set_level(logging.WARNING)
    load(tokenizer, {}, {"enable_thinking": True}, {}, {"enable_thinking": False})
    (record,) = caplog.records
    assert "2 rows have a column enable_thinking, which the chat template does not read" in record.getMessage()


def test_a_column_that_is_neither_true_nor_false_is_a_bad_row(load, tokenizer):
    tokenizer.chat_template = THINKS
    message = rejection(load, tokenizer, {}, {"enable_thinking": True}, {"enable_thinking": "false"})
    assert "line 2: the column enable_thinking holds 'false', not true or false" in message
