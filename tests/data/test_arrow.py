"""The same rows as JSON lines, as parquet of pyarrow and of datasets, and as a saved data set are the same rows."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from hybridrl.config.findings import ConfigError
from hybridrl.data.prompts import load_prompts
from hybridrl.data.rows import Faults, load_rows, read_columns

WITH_TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}\n{% endfor %}"
)


def tool(name: str, **properties: str) -> dict[str, Any]:
    parameters = {name: {"type": kind} for name, kind in properties.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": parameters}}}


def row(number: int, call: dict[str, Any], extra: dict[str, Any], tools: list[dict]) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "call", "arguments": call}}]
    return {
        "prompt": [
            {"role": "user", "content": f"What is {number}?"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": "7"},
        ],
        "reward_model": {"style": "rule", "ground_truth": {"answer": "1"} if number else {"tests": [1, 2]}},
        "extra_info": {"index": number, "tools_kwargs": extra},
        "tools": tools,
    }


ROWS = [
    row(0, {"city": "Rome"}, {"alpha": {"create_kwargs": {"x": 1}}}, [tool("weather", city="string")]),
    row(1, {"a": 1, "b": None}, {"beta": {"create_kwargs": {"y": "s"}}}, [tool("add", a="integer", b="integer")]),
]


def as_json(directory: Path) -> str:
    (directory / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in ROWS))
    return str(directory / "rows.jsonl")


def as_parquet(directory: Path) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), directory / "rows.parquet")
    return str(directory / "rows.parquet")


def as_datasets_parquet(directory: Path) -> str:
    datasets.Dataset.from_list(ROWS).to_parquet(directory / "datasets.parquet")
    return str(directory / "datasets.parquet")


def as_saved_dataset(directory: Path) -> str:
    datasets.Dataset.from_list(ROWS).save_to_disk(directory / "saved")
    return str(directory / "saved")


@pytest.mark.parametrize("write", [as_parquet, as_datasets_parquet, as_saved_dataset])
def test_rows_have_the_same_tokens_and_arguments_in_every_form(write, tmp_path, config, tokenizer):
    tokenizer.chat_template = WITH_TOOLS

    def load(file: str) -> list[Any]:
        data = load_prompts([file], config, tokenizer, max_samples=-1, shuffle=False, key="data.train_files")
        return [(one.ids, one.ground_truth, one.extra_info, one.tools) for one in data]

    # A null that was written looks like one that Arrow added; in JSON it stays.
    given, expected = load(write(tmp_path)), load(as_json(tmp_path))
    assert (
        '"b": null' in tokenizer.decode(expected[1][0]) and '"b"' not in tokenizer.decode(given[1][0]).split("user")[1]
    )
    assert given[0] == expected[0] and given[1][1:] == expected[1][1:]
    assert '"city"' in tokenizer.decode(given[0][0]) and '"a"' not in tokenizer.decode(given[0][0])


def test_the_fields_of_a_column_that_is_a_structure_stay(tmp_path):
    rows = [{"extra_info": {"a": 1, "nested": {"x": 1}}}, {"extra_info": {"b": 2, "nested": {"y": 2}}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert [one["extra_info"] for one in read_columns(tmp_path / "rows.parquet")] == [
        {"a": 1, "b": None, "nested": {"x": 1}},
        {"a": None, "b": 2, "nested": {"y": 2}},
    ]


def test_a_null_in_a_list_a_map_or_json_text_was_written(tmp_path):
    struct = pyarrow.struct([("list", pyarrow.list_(pyarrow.int64())), ("text", pyarrow.string())])
    table = pyarrow.table(
        {
            "a": pyarrow.array([[{"list": [1, None], "text": '{"x": null}'}]], pyarrow.list_(struct)),
            "m": pyarrow.array([[("k", None)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert list(read_columns(tmp_path / "rows.parquet")) == [
        {"a": [{"list": [1, None], "text": '{"x": null}'}], "m": {"k": None}}
    ]


def test_json_of_arrow_is_decoded_also_inside_structures(tmp_path):
    kind = pyarrow.json_(pyarrow.string())
    texts = pyarrow.array(['{"city": "Rome", "note": null}', "[1]"])
    column = pyarrow.ExtensionArray.from_storage(kind, texts)
    nested = pyarrow.StructArray.from_arrays([column, pyarrow.array(["x", "y"])], ["arguments", "name"])
    pyarrow.parquet.write_table(pyarrow.table({"plain": column, "nested": nested}), tmp_path / "rows.parquet")
    assert list(read_columns(tmp_path / "rows.parquet")) == [
        {"plain": {"city": "Rome", "note": None}, "nested": {"arguments": {"city": "Rome", "note": None}, "name": "x"}},
        {"plain": [1], "nested": {"arguments": [1], "name": "y"}},
    ]


def test_dictionaries_inside_structures_are_read_over_several_row_groups(tmp_path):
    words = pyarrow.array(["p", "q", "p"]).dictionary_encode()
    table = pyarrow.table({"a": pyarrow.StructArray.from_arrays([words], ["word"])})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=2)
    assert [one["a"]["word"] for one in read_columns(tmp_path / "rows.parquet")] == ["p", "q", "p"]


def test_json_that_cannot_be_decoded_names_the_file(tmp_path):
    column = pyarrow.ExtensionArray.from_storage(pyarrow.json_(pyarrow.string()), pyarrow.array(["{no"]))
    pyarrow.parquet.write_table(pyarrow.table({"a": column}), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"rows\.parquet: not a readable \.parquet file"):
        load_rows(
            [str(tmp_path / "rows.parquet")], Faults("data.train_files"), key="", max_samples=-1, shuffle=False, seed=0
        )
