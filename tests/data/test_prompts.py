import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import Qwen2Tokenizer

from hybridrl.agents.environments import ground_truth, interaction_kwargs, tools_kwargs
from hybridrl.config.findings import ConfigError
from hybridrl.config.schema import DataConfig
from hybridrl.config.teachers import DistillationConfig
from hybridrl.data.prompts import Prompt, PromptDataset, load_prompts
from hybridrl.runs.models import taught
from tests.sections import section_of, teacher_of

Write = Callable[..., str]


def row(prompt: Any, **columns: Any) -> dict[str, Any]:
    return {"data_source": "sums", "prompt": prompt, "reward_model": {"ground_truth": "4"}, **columns}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def load(file: str, config: DataConfig, tokenizer: Qwen2Tokenizer) -> PromptDataset:
    return load_prompts([file], config, tokenizer, max_samples=-1, shuffle=False, key="data.train_files")


def rejection(file: str, config: DataConfig, tokenizer: Qwen2Tokenizer) -> str:
    with pytest.raises(ConfigError) as error:
        load(file, config, tokenizer)
    return str(error.value)


def test_a_row_becomes_a_prompt_with_the_generation_prompt(write, config, tokenizer):
    dataset = load(write(row(user("2+2?"), extra_info={"index": 7})), config, tokenizer)
    assert tokenizer.decode(dataset[0].ids) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert replace(dataset[0], ids=[]) == Prompt(0, [], user("2+2?"), "sums", "4", {"index": 7})


def test_a_plain_string_becomes_a_user_message(write, config, tokenizer):
    text, chat = load(write(row("2+2?"), row(user("2+2?"))), config, tokenizer)
    assert text.ids == chat.ids


def test_a_plain_string_is_used_raw_without_a_chat_template(write, config, plain_tokenizer):
    (prompt,) = load(write(row("2+2?")), config, plain_tokenizer)
    assert plain_tokenizer.decode(prompt.ids) == "2+2?"


def test_chat_messages_without_a_chat_template_are_rejected_with_both_fixes(write, config, plain_tokenizer):
    message = rejection(write(row("2+2?"), row(user("2+2?"))), config, plain_tokenizer)
    assert "1 rows have chat messages" in message
    assert "actor_rollout_ref.model.custom_chat_template" in message
    assert "plain strings" in message


def test_template_arguments_reach_the_template(write, config, tokenizer):
    tokenizer.chat_template = "{{ messages[0].content }}{{ ' /think' if think else '' }}"
    config = replace(config, apply_chat_template_kwargs={"think": True})
    (prompt,) = load(write(row("2+2?")), config, tokenizer)
    assert tokenizer.decode(prompt.ids) == "2+2? /think"


def test_a_row_may_lack_extra_info_and_data_source(write, config, tokenizer):
    dataset = load(write(row("a", extra_info=None, data_source=None), row("b", task="t")), config, tokenizer)
    assert (dataset[0].extra_info, dataset[0].data_source) == ({}, "unknown")
    assert dataset.data_sources == {"unknown", "sums"}
    config = replace(config, reward_fn_key="task")
    assert load(write(row("b", task="t")), config, tokenizer).data_sources == {"t"}


EXTRA = {"index": 7, "tools_kwargs": {"add": {"create_kwargs": {"x": 1}}}, "tests": ["a"], "note": "{}"}


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_columns_that_are_json_text_are_what_the_text_holds(write, config, tokenizer, tmp_path, form):
    inner = EXTRA | {"tools_kwargs": json.dumps(EXTRA["tools_kwargs"]), "tool_selection": '["add"]'}
    names = {"reward_model": {"style": "rule", "ground_truth": "5"}, "interaction_kwargs": {"name": "a"}}
    texts = [row("x", extra_info=json.dumps(one), **{n: json.dumps(names[n]) for n in names}) for one in (EXTRA, inner)]
    if form == "parquet":
        texts += [texts[0] | {"extra_info": one} for one in (None, "")]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(texts), file := str(tmp_path / "rows.parquet"))
    else:
        file = write(*texts, row("x", extra_info=None), row("x", extra_info=""))
    first, second, *absent = load(file, config, tokenizer)
    assert first.extra_info == EXTRA and second.extra_info == EXTRA | {"tool_selection": ["add"]}
    for prompt in (first, second):
        assert prompt.ground_truth == "5" and prompt.columns["extra_info"] == prompt.extra_info
        assert tools_kwargs(prompt.columns) == EXTRA["tools_kwargs"]
        assert interaction_kwargs(prompt.columns) == {"name": "a"}
    assert [prompt.extra_info for prompt in absent] == [{}, {}]


def test_a_ground_truth_of_null_is_for_custom_rewards(write, config, tokenizer, tmp_path):
    model = {"style": "model", "ground_truth": None}
    rows = [row("x"), row("x", reward_model=model), row("x", reward_model=json.dumps(model))]
    rows += [row("x", reward_model=None, reward_spec=model)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:2]), tmp_path / "rows.parquet")
    options = {"max_samples": -1, "shuffle": False, "key": "data.train_files", "needs_truth": False}
    for file, count in ((write(*rows), 3), (str(tmp_path / "rows.parquet"), 1)):
        prompts = load_prompts([file], config, tokenizer, **options)
        assert [prompt.ground_truth for prompt in prompts] == ["4", *[None] * count]
        assert [ground_truth(prompt.columns) for prompt in prompts] == ["4", *[None] * count]
        assert "2: the ground truth is null: set reward.custom_reward" in rejection(file, config, tokenizer)
    own = replace(config, ground_truth_key="answer")
    file = write(row("x", answer=None), row("x", answer={"ground_truth": None}))
    assert [one.ground_truth for one in load_prompts([file], own, tokenizer, **options)] == [None] * 2
    with pytest.raises(ConfigError, match="line 1: no ground truth"):
        load_prompts([write(row("x", reward_model={"style": "model"}))], config, tokenizer, **options)


def test_ground_truths_of_any_type_are_unchanged(write, config, tokenizer):
    truths = ["4", 4, ["4", "four"], {"target": 4}, 0, False, ""]
    rows = [row("2+2?", reward_model={"ground_truth": truth}) for truth in truths]
    assert [prompt.ground_truth for prompt in load(write(*rows), config, tokenizer)] == truths


@pytest.mark.parametrize(
    ("key", "column", "truth"),
    [
        ("answer", "4", "4"),
        ("solution", ["4", "four"], ["4", "four"]),
        ("answer", 0, 0),
        ("answer", '{"target": 4}', '{"target": 4}'),  # what a text means is the reward's
        ("truth", {"style": "rule", "ground_truth": "4"}, "4"),
        ("truth", '{"style": "rule", "ground_truth": [4, null]}', [4, None]),
        ("reward_model", "4", "4"),
        ("reward_model", '{"style": "rule", "ground_truth": "4"}', "4"),
    ],
)
def test_the_ground_truth_may_be_in_any_column(write, config, tokenizer, key, column, truth):
    config = replace(config, ground_truth_key=key)
    rows = [{"data_source": "s", "prompt": "2+2?", key: column}, row("2+2?", **{key: column})]
    for prompt in load(write(*rows), config, tokenizer):
        assert (prompt.ground_truth, ground_truth(prompt.columns)) == (truth, truth)


def test_a_column_that_is_called_like_the_ground_truth_is_none_unless_it_is_named(write, config, tokenizer):
    (prompt,) = load(write(row("2+2?", ground_truth="so it is #### 5")), config, tokenizer)
    assert (prompt.ground_truth, ground_truth(prompt.columns)) == ("4", "4")


def test_a_column_of_the_ground_truth_that_is_absent_is_rejected_with_those_that_there_are(
    write: Write, config: DataConfig, tokenizer: Qwen2Tokenizer
) -> None:
    config = replace(config, ground_truth_key="answr")
    rows = [{"prompt": "2+2?", "answer": "4"}, {"prompt": "2+2?", "answr": None}, {"prompt": "2+2?"}]
    text = rejection(write(*rows), config, tokenizer)
    fault = "no ground truth: data.ground_truth_key=answr is"
    assert f"line 1: {fault} not a column: the row has prompt, answer; set data.ground_truth_key=answer?" in text
    assert "line 2: the ground truth is null" in text
    assert f"line 3: {fault} not a column: the row has prompt" in text


def test_a_row_without_reward_model_names_the_key_of_its_other_column(write, config, tokenizer):
    text = rejection(write({"prompt": "2+2?", "solution": "4"}), config, tokenizer)
    assert text.endswith("; set data.ground_truth_key=solution?")


def test_null_fields_that_parquet_adds_to_messages_do_not_reach_the_template(tmp_path, config, tokenizer):
    rows = [row(user("2+2?")), row([{"role": "user", "content": "x", "name": "Ann"}])]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    tokenizer.chat_template = "{{ 'named' if 'name' in messages[0] else 'nameless' }}"
    nameless, named = load(str(tmp_path / "rows.parquet"), config, tokenizer)
    assert [tokenizer.decode(prompt.ids) for prompt in (nameless, named)] == ["nameless", "named"]


def test_all_bad_rows_are_in_one_message_with_line_and_reason(write, config, tokenizer):
    rows = [
        row("fine"),
        {"question": "2+2?", "reward_model": {"ground_truth": "4"}},
        row("x", reward_model={"style": "rule"}),
        row([]),
        row([{"role": "user"}]),
        row("x", extra_info='{"index": 7'),
        {"question": "2+2?"},
    ]
    message = rejection(write(*rows), config, tokenizer)
    assert message.startswith("data.train_files: 6 bad rows\n")
    assert "line 2: no prompt: data.prompt_key=prompt" in message
    assert "the row has question, reward_model" in message
    assert "line 3: no ground truth" in message
    assert "line 4: no prompt" in message and "(and 1 more row)" in message
    assert "line 5" not in message
    assert "line 6: extra_info is not an object ({...}) or JSON text of one, but '{\"index\": 7': write it" in message


def test_bad_rows_are_listed_in_the_order_of_the_file_however_they_are_shuffled(write, config, tokenizer):
    file = write(*({f"question_{number}": "?"} for number in range(40)))
    with pytest.raises(ConfigError) as error:
        load_prompts([file], config, tokenizer, max_samples=-1, shuffle=True, key="data.train_files")
    assert [line.partition(": ")[0] for line in str(error.value).splitlines()[1:6]] == [
        f"  {file}, line {number}" for number in (1, 2, 3, 4, 5)
    ]


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"images": [{"bytes": "x"}]}, "the column images"),
        ({"videos": ["a.mp4"]}, "the column videos"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}]},
            "a part of type image",
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "a part of type input_audio"),
    ],
)
def test_a_multimodal_row_is_rejected(write, config, tokenizer, more, fault):
    message = rejection(write(row("fine"), row("<image>what is it?") | more), config, tokenizer)
    assert f"line 2: more than text: {fault}; leave such rows out: only text is supported" in message


def test_the_word_image_in_a_text_is_text(write, config, tokenizer):
    (prompt,) = load(write(row("what does <image> mean?") | {"images": [], "videos": None}), config, tokenizer)
    assert "<image>" in tokenizer.decode(prompt.ids)


def test_a_conversation_that_the_template_rejects_is_named(write, config, tokenizer):
    tokenizer.chat_template = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}x"
    message = rejection(write(row("a"), row([{"role": "tool", "content": "b"}]), row("c")), config, tokenizer)
    assert "1 bad row\n" in message
    assert "line 2: the chat template rejects it: no tools here" in message


def test_overlong_prompts_are_rejected_with_row_length_limit_and_fixes(write, config, plain_tokenizer):
    config = replace(config, max_prompt_length=4)
    message = rejection(write(row("1234"), row("12345"), row("123456")), config, plain_tokenizer)
    assert "2 of 3 rows are longer than data.max_prompt_length=4" in message
    assert "rows.jsonl, line 2 with 5 tokens, the longest has 6" in message
    assert "data.filter_overlong_prompts=true" in message
    assert "data.truncation=left|right|middle" in message


@pytest.mark.parametrize(("side", "left"), [("left", "34567"), ("right", "12345"), ("middle", "12567")])
def test_overlong_prompts_are_truncated_on_the_configured_side(write, config, plain_tokenizer, side, left, caplog):
    config = replace(config, max_prompt_length=5, truncation=side)
    dataset = load(write(row("1234567"), row("12")), config, plain_tokenizer)
    assert [plain_tokenizer.decode(prompt.ids) for prompt in dataset] == [left, "12"]
    assert "1 of 2 rows are longer than data.max_prompt_length=5" in caplog.text
    assert f"truncated (data.truncation={side})" in caplog.text


def test_overlong_prompts_are_dropped_and_counted_with_the_filter(write, config, plain_tokenizer, caplog):
    config = replace(config, max_prompt_length=4, filter_overlong_prompts=True)
    with caplog.at_level(logging.WARNING):
        dataset = load(write(row("12345"), row("12"), row("1")), config, plain_tokenizer)
    assert [(prompt.row, len(prompt.ids)) for prompt in dataset] == [(1, 2), (2, 1)]
    assert "1 of 3 rows are longer" in caplog.text
    assert "longer than" in rejection(write(row("12345")), config, plain_tokenizer)


def test_a_dataset_is_a_sequence_with_lengths(write, config, plain_tokenizer):
    dataset = load(write(row("1"), row("12"), row("123")), config, plain_tokenizer)
    assert dataset.ids.lengths.tolist() == [1, 2, 3]
    assert plain_tokenizer.decode(dataset[-1].ids) == "123"
    assert [prompt.row for prompt in dataset] == [0, 1, 2]
    with pytest.raises(IndexError):
        dataset[3]


@pytest.mark.parametrize(
    ("columns", "hint"),
    [
        (["promt", "question"], "set data.prompt_key=promt?"),
        (["answer", "question"], "set data.prompt_key=question?"),
        (["answer"], "the row has answer, reward_model;"),
    ],
)
def test_another_name_of_the_prompt_column_is_proposed(write, config, tokenizer, columns, hint):
    bad = dict.fromkeys(columns, "x") | {"reward_model": {"ground_truth": "4"}}
    assert hint in rejection(write(row("fine"), bad), config, tokenizer) + ";"


def test_no_other_column_is_proposed_for_an_invalid_prompt(write, config, tokenizer):
    assert "set data.prompt_key" not in rejection(write(row(None, question="x")), config, tokenizer)


def test_a_dataset_holds_the_rows_that_were_kept(write, config, plain_tokenizer):
    config = replace(config, max_prompt_length=4, filter_overlong_prompts=True)
    dataset = load(write(row("12345"), row("12"), row("1")), config, plain_tokenizer)
    assert [kept.values["prompt"] for kept in dataset.rows] == ["12", "1"]
    assert dataset.over == 1


def test_one_bad_row_among_many_is_named(write, config, plain_tokenizer):
    rows = [row("x")] * 3000
    rows[2345] = {"prompt": "x"}
    assert "1 bad row\n" in (message := rejection(write(*rows), config, plain_tokenizer))
    assert "rows.jsonl, line 2346: no ground truth" in message


@pytest.mark.parametrize(("reward", "kind"), [("4", "a text"), ('["4"]', "a text"), (["4"], "a list, ['4']")])
def test_a_ground_truth_in_a_text_or_a_list_is_named(write, config, tokenizer, reward, kind):
    text = rejection(write(row(user("2+2?")) | {"reward_model": reward}), config, tokenizer)
    assert f"line 1: reward_model holds {kind}" in text
    assert "no ground truth" not in text and text.endswith("convert it")


def test_a_role_that_the_template_does_not_know_is_a_warning(write, config, tokenizer, caplog):
    rows = [row([*user("2+2?"), {"role": "bot", "content": "?"}]), row(user("3+3?"))]
    load(write(*rows), config, tokenizer)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("data.train_files: 1 rows have messages of the role bot, which is not a usual one; ")
    caplog.clear()
    tokenizer.chat_template = "{# bot #}" + str(tokenizer.chat_template)
    load(write(*rows), config, tokenizer)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_template_without_a_system_role_is_rejected_with_a_fix(write, config, tokenizer):
    rule = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    tokenizer.chat_template = rule + "{% for m in messages %}{{ m.content }}{% endfor %}"
    text = rejection(write(row([{"role": "system", "content": "Be brief."}, *user("2+2?")])), config, tokenizer)
    assert "System role not supported; put the system message into the user's, or set" in text


CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    "prompt",
    [
        '[{"role": "user", "content": "2+2?"}]',
        [{"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}],
        [{"role": "user", "content": "2+2?", "name": None}],
    ],
    ids=["JSON text", "parts of text", "null fields"],
)
def test_messages_in_another_form_are_the_same_prompt(prompt, write, config, tokenizer, caplog):
    caplog.set_level(logging.INFO)
    (plain,) = load(write(row(user("2+2?"))), config, tokenizer)
    caplog.clear()
    (other,) = load(write(row(prompt)), config, tokenizer)
    assert (other.ids, other.messages) == (plain.ids, plain.messages)
    assert ("1 with chat messages as JSON text" in caplog.text) == isinstance(prompt, str)


def test_a_text_that_is_json_but_no_chat_stays_a_text(write, config, tokenizer):
    (prompt,) = load(write(row("[1, 2, 3]")), config, tokenizer)
    assert prompt.messages == "[1, 2, 3]"


def test_a_message_with_calls_needs_no_content(write, config, tokenizer):
    fault = "line 1: the chat template rejects it: it leaves out the calls of tools, which the messages have"
    assert fault in rejection(
        write(row([*user("2+2?"), {"role": "assistant", "tool_calls": [CALL]}])), config, tokenizer
    )
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}"
    earlier = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    (prompt,) = load(write(row([*user("2+2?"), earlier, *user("so?")])), config, tokenizer)
    assert prompt.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    fault = rejection(write(row([{"role": "user", "content": None}])), config, tokenizer)
    assert "data.prompt_key=prompt must hold chat messages" in fault


@pytest.mark.parametrize("form", [lambda tools: tools, json.dumps], ids=["list", "JSON text"])
def test_the_tools_of_a_row_reach_the_template(form, write, config, tokenizer, caplog):
    caplog.set_level(logging.INFO)
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "add"}}, {"type": "function", "function": {"name": "sub"}}]
    file = write(row(user("a"), tools=form(tools)), row(user("b")), row(user("c"), schemas=form(tools[:1])))
    texts = [tokenizer.decode(prompt.ids) for prompt in load(file, config, tokenizer)]
    assert texts == ["add;sub;a", "b", "c"]
    assert "1 with tools (data.tools_key=tools)" in caplog.text
    texts = [tokenizer.decode(prompt.ids) for prompt in load(file, replace(config, tools_key="schemas"), tokenizer)]
    assert texts == ["a", "b", "add;c"]


def test_tools_that_are_no_list_of_schemas_are_bad_rows(write, config, tokenizer):
    for tools in ("weather", {"type": "function"}, ["weather"]):
        message = rejection(write(row(user("a"), tools=tools)), config, tokenizer)
        assert "line 1: data.tools_key=tools must hold a list of schemas of tools" in message


def teachers(**models: tuple[str, str | None]) -> DistillationConfig:
    section = section_of(DistillationConfig, "distillation")
    named = {name: teacher_of(key=key, model_path=path) for name, (key, path) in models.items()}
    return replace(section, enabled=True, teacher_key="kind", teacher_models=named)


def test_each_row_has_the_number_of_the_teacher_that_its_column_names(write, config, tokenizer):
    data = load(write(*(row("x", kind=kind) for kind in ("a", "b", "c", "a", 7))), config, tokenizer)
    section = teachers(one=("b", "model"), none=("c", None), rest=("*", "other"))
    carried = [prompt.carried for prompt in taught(data, section)]
    assert [fields["teacher"].tolist() for fields in carried] == [[1], [0], [-1], [1], [1]]
    assert [fields["taught"].tolist() for fields in carried] == [[True], [True], [False], [True], [True]]


@pytest.mark.parametrize(
    ("models", "cause"),
    [
        ({"one": ("a", "m")}, "values without a teacher, b (2 rows), c (1 rows); there are one (key=a)"),
        ({"one": ("*", "m"), "two": ("d", "m")}, "two.key=d: no row has it in the column kind"),
        ({"one": ("*", "m"), "none": ("d", None)}, "none.key=d: no row has it in the column kind"),
    ],
)
def test_rows_without_a_teacher_and_teachers_without_a_row_are_rejected(write, config, tokenizer, models, cause):
    data = load(write(*(row("x", kind=kind) for kind in "abbc")), config, tokenizer)
    with pytest.raises(ConfigError, match=re.escape(cause)) as caught:
        taught(data, teachers(**models))
    assert "model_path=null for rows without one" in str(caught.value)
