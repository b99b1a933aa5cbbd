"""Rows of any shape: the same in every form of file; wrong ones are refused by line or used as they were written."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Tokenizer

from hybridrl.config.findings import ConfigError
from hybridrl.config.schema import DataConfig, SFTDataConfig
from hybridrl.data.conversations import load_conversations
from hybridrl.data.prompts import load_prompts
from tests.data.test_arrow import WITH_TOOLS
from tests.fuzz import EXAMPLES

Strategy = st.SearchStrategy[Any]
LIMITS = {"max_prompt_length": 100_000, "max_response_length": 512}
TEXTS = st.text(st.characters(exclude_categories=["C"]), max_size=4)
NAMES = st.sampled_from(["city", "unit", "a", "b c"])
LEAVES = st.sampled_from([pyarrow.string(), pyarrow.int64(), pyarrow.bool_(), pyarrow.float64()])


def structs(inner: Strategy) -> Strategy:
    fields = st.dictionaries(NAMES, inner, min_size=1, max_size=3)
    return fields.map(lambda kinds: pyarrow.struct(list(kinds.items())))


KINDS = st.recursive(LEAVES, lambda inner: structs(inner) | inner.map(pyarrow.list_), max_leaves=4)


def values(kind: pyarrow.DataType) -> Strategy:
    """Values of a type; each field of a structure may be absent, as JSON can be and Arrow cannot. The fields have the
    order of the type: Arrow has one for all rows."""
    if pyarrow.types.is_struct(kind):
        some = st.fixed_dictionaries({}, optional={field.name: values(field.type) for field in kind})
        return some.map(lambda given: {field.name: given[field.name] for field in kind if field.name in given})
    if pyarrow.types.is_list(kind):
        return st.lists(values(kind.value_type), max_size=2)
    leaves = {pyarrow.string(): TEXTS, pyarrow.bool_(): st.booleans(), pyarrow.float64(): st.floats(-8, 8, width=16)}
    return leaves.get(kind, st.integers(-9, 9))


@st.composite
def tables(draw: Callable[[Strategy], Any]) -> tuple[list[dict[str, Any]], pyarrow.Schema]:
    """Rows for both kinds of training, with tools, calls and columns of several shapes, and their Arrow types."""
    arguments, extra, properties = draw(structs(KINDS)), draw(structs(KINDS)), draw(structs(structs(LEAVES)))
    call = pyarrow.struct({"function": pyarrow.struct({"name": pyarrow.string(), "arguments": arguments})}.items())
    message = {"role": pyarrow.string(), "content": pyarrow.string(), "tool_calls": pyarrow.list_(call)}
    messages = pyarrow.list_(pyarrow.struct(message.items()))
    parameters = pyarrow.struct({"properties": properties}.items())
    tool = pyarrow.struct(
        {"function": pyarrow.struct({"name": pyarrow.string(), "parameters": parameters}.items())}.items()
    )
    kinds = {"prompt": messages, "messages": messages, "tools": pyarrow.list_(tool), "extra_info": extra}
    kinds["reward_model"] = pyarrow.struct({"ground_truth": draw(KINDS)}.items())
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        called = {"role": "assistant", "content": draw(TEXTS)}
        if draw(st.booleans()):
            called["tool_calls"] = [{"function": {"name": "f", "arguments": draw(values(arguments))}}]
        asked = [{"role": "user", "content": draw(TEXTS)}, called, {"role": "tool", "content": "7"}]
        row = {"prompt": asked, "messages": [*asked, {"role": "assistant", "content": draw(TEXTS)}]}
        if draw(st.booleans()):
            schema = {"name": "f", "parameters": {"properties": draw(values(properties))}}
            row["tools"] = [{"function": schema}]
        row["reward_model"] = {"ground_truth": draw(values(kinds["reward_model"][0].type))}
        rows.append(row | ({"extra_info": draw(values(extra))} if draw(st.booleans()) else {}))
    return rows, pyarrow.schema(kinds.items())


def forms(rows: list[dict[str, Any]], schema: pyarrow.Schema, directory: Path) -> list[str]:
    """The rows as JSON lines, as a JSON list, as parquet of pyarrow and of datasets, and as a saved data set."""
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "rows.json").write_text(json.dumps(rows))
    table = pyarrow.Table.from_pylist(rows, schema=schema)
    pyarrow.parquet.write_table(table, directory / "rows.parquet")
    saved = datasets.Dataset(table)
    saved.to_parquet(directory / "datasets.parquet")
    saved.save_to_disk(directory / "saved")
    return [str(directory / name) for name in ("rows.jsonl", "rows.json", "rows.parquet", "datasets.parquet", "saved")]


def without_nulls(value: Any) -> Any:
    """A column that is a structure keeps the fields that Arrow adds: rewards read them by name."""
    return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value


@pytest.fixture
def own_config(config: DataConfig) -> DataConfig:
    return replace(config, **LIMITS)


@pytest.fixture
def load(own_config: DataConfig, tokenizer: Qwen2Tokenizer) -> Callable[[str], list[Any]]:
    tokenizer.chat_template = WITH_TOOLS + "{% if add_generation_prompt %}assistant: {% endif %}"

    def run(file: str) -> list[Any]:
        data = load_prompts([file], own_config, tokenizer, max_samples=-1, shuffle=False, key="data.train_files")
        return [(one.ids, one.ground_truth, without_nulls(one.extra_info), one.tools, one.data_source) for one in data]

    return run


def test_rows_of_any_shape_are_the_same_in_every_form(load, sft_config: SFTDataConfig, tokenizer, tmp_path_factory):
    sft = replace(sft_config, max_length=100_000)

    @settings(max_examples=EXAMPLES // 4)  # each of one to four rows, in five forms
    @given(tables())
    def check(made: tuple[list[dict[str, Any]], pyarrow.Schema]) -> None:
        first, *others = forms(*made, tmp_path_factory.mktemp("forms"))
        prompts = load(first)
        conversations = list(
            load_conversations([first], sft, tokenizer, max_samples=-1, shuffle=False, key="data.train_files")
        )
        for row, (_, truth, *_) in zip(made[0], prompts, strict=True):
            assert truth == row["reward_model"]["ground_truth"]
        for other in others:
            assert load(other) == prompts, other
            again = load_conversations([other], sft, tokenizer, max_samples=-1, shuffle=False, key="data.train_files")
            assert list(again) == conversations, other

    check()


# -- wrong rows --------------------------------------------------------------------------------------------------------

ROW = {
    "data_source": "sums",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1?"}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7, "split": "train"},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}],
}
PATHS: list[tuple[str | int, ...]] = [("data_source",), ("prompt",), ("reward_model",), ("extra_info",), ("tools",)]
PATHS += [("prompt", 0), ("prompt", 1), ("prompt", 1, "role"), ("prompt", 1, "content"), ("tools", 0)]
PATHS += [("reward_model", "ground_truth"), ("tools", 0, "function"), ("tools", 0, "function", "name")]
PATHS += [("tools", 0, "function", "parameters"), ("extra_info", "index")]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
)
JSON |= st.sampled_from(["[", "[1]", '[{"role": "user", "content": "x"}]', "{}", '{"ground_truth": "3"}', [{}], [[]]])
JSON |= st.sampled_from([[{"role": "user"}], [{"role": "user", "content": None}], [{"type": "text", "text": "parts"}]])


def changed(path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    row = deepcopy(ROW)
    *outer, last = path
    place: Any = row
    for name in outer:
        place = place[name]
    place[last] = value
    return row


def test_a_row_with_any_value_in_any_place_is_refused_by_line_or_used_as_it_was_written(load, tmp_path, tokenizer):
    @settings(max_examples=EXAMPLES)
    @given(st.sampled_from(PATHS), JSON)
    def check(path: tuple[str | int, ...], value: Any) -> None:
        row = changed(path, value)
        (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n" + json.dumps(row) + "\n")
        try:
            _, (ids, truth, extra, tools, source) = load(str(tmp_path / "rows.jsonl"))
        except ConfigError as error:
            assert "line 2" in str(error) and path[0] in str(error), (path, value, str(error))
            return
        text = tokenizer.decode(ids)
        if path == ("prompt", 1, "content"):
            assert (value if isinstance(value, str) else "".join(part["text"] for part in value)) in text
        elif path[0] == "reward_model":
            held = row["reward_model"]  # which may be JSON text
            assert (json.loads(held) if isinstance(held, str) else held)["ground_truth"] == truth
        elif path[0] == "extra_info":
            held = row["extra_info"] or {}  # likewise
            assert extra == without_nulls(json.loads(held) if isinstance(held, str) else held)
        elif path[0] == "data_source":
            assert source == ("unknown" if value is None else str(value)) and not isinstance(value, list | dict)
        elif path[0] == "tools":
            whole = json.loads(value or "[]") if path == ("tools",) and isinstance(value, str) else row["tools"]
            assert tools == (whole or [])

    check()
