import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from hybridrl.config.findings import ConfigError
from hybridrl.data.row_files import row_files
from hybridrl.data.rows import DataRow, Faults, load_rows

KEY = "data.train_files"
ROWS = [{"a": 1, "b": {"c": "x"}}, {"a": 2, "b": {"c": "y"}}]


def load(*files: str, max_samples: int = -1, shuffle: bool = False, seed: int = 0) -> list[DataRow]:
    faults = Faults(KEY)
    rows = load_rows(list(files), faults, key=KEY, max_samples=max_samples, shuffle=shuffle, seed=seed)
    faults.close()
    return rows


def test_parquet_json_and_jsonl_give_the_same_rows(tmp_path: Path, write: Callable[..., str]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    (tmp_path / "list.json").write_text(json.dumps(ROWS, indent=1))
    lines = write(*ROWS, name="lines.json")
    for file in (tmp_path / "rows.parquet", tmp_path / "list.json", lines, write(*ROWS)):
        assert [row.values for row in load(str(file))] == ROWS


def test_files_are_read_in_order_and_rows_are_counted_over_all_of_them(write: Callable[..., str]) -> None:
    first, second = write({"a": 1}, {"a": 2}, name="first.jsonl"), write({"a": 3}, name="second.jsonl")
    rows = load(first, second)
    assert [(row.number, row.values["a"]) for row in rows] == [(0, 1), (1, 2), (2, 3)]
    assert rows[2].place == f"{second}, line 1"


def test_a_row_keeps_its_fields_and_types_independent_of_other_rows(write: Callable[..., str]) -> None:
    rows = [
        {"truth": "1", "extra": {"index": 0}},
        {"truth": ["1", "2"], "extra": None},
        {"truth": 3, "extra": {"z": 1}},
    ]
    assert [row.values for row in load(write(*rows))] == rows


def test_blank_lines_are_not_rows_but_count_as_lines(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('\ufeff{"a": 1}\r\n\r\n{"a": 2}\r\n', encoding="utf-8")
    assert load(str(tmp_path / "rows.jsonl"))[1].place.endswith("rows.jsonl, line 3")


def test_all_lines_that_are_not_objects_are_in_one_message(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a":\nnull\n[1]\n')
    with pytest.raises(ConfigError) as error:
        load(str(tmp_path / "rows.jsonl"))
    assert "3 bad rows" in str(error.value)
    assert "line 2: not JSON (Expecting value at column" in str(error.value)
    assert "line 3: not an object of columns ({...}) (and 1 more row)" in str(error.value)


def test_a_missing_file_is_named_with_the_nearest_one(tmp_path: Path, write: Callable[..., str]) -> None:
    write({"a": 1}, name="train.jsonl")
    with pytest.raises(ConfigError, match=r"data.train_files=.*trian.jsonl: .*did you mean train.jsonl\?"):
        load(str(tmp_path / "trian.jsonl"))


def test_an_unsupported_file_type_is_rejected_with_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows.xlsx: files of rows end in .parquet, .json, .*, .csv, "):
        load(str(tmp_path / "rows.xlsx"))


@pytest.mark.parametrize("name", ["rows.parquet", "rows.json", "rows.jsonl", "rows.jsonl.gz", "rows.arrow"])
def test_an_unreadable_file_is_rejected_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"[\xff\x00 PAR")
    with pytest.raises(ConfigError, match=rf"data.train_files=.*{name}: not a readable"):
        load(str(tmp_path / name))


def test_a_file_without_rows_is_rejected(write: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="there are no rows; name a file that holds some"):
        load(write())


@pytest.mark.parametrize(("line", "fault"), [("7", "not an object of columns ({...})"), ("not JSON", "not JSON (")])
def test_a_thousand_bad_rows_are_enough(tmp_path: Path, line: str, fault: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{line}\n" * 2000)
    with pytest.raises(ConfigError, match=r"^data.train_files: 1000 or more bad rows\n") as error:
        load(str(tmp_path / "rows.jsonl"))
    assert str(error.value).count("\n") == 1
    assert f"line 1: {fault}" in str(error.value) and "(and 999 more rows)" in str(error.value)


def test_max_samples_takes_the_first_rows_or_with_shuffle_a_seeded_choice(write: Callable[..., str]) -> None:
    file = write(*({"a": i} for i in range(100)))

    def chosen(seed: int, max_samples: int = 10) -> list[int]:
        return [row.number for row in load(file, max_samples=max_samples, shuffle=True, seed=seed)]

    assert [row.number for row in load(file, max_samples=3)] == [0, 1, 2]
    assert chosen(seed=1) == chosen(seed=1)
    assert len(set(chosen(seed=1))) == 10
    assert chosen(seed=1) != chosen(seed=2)
    assert chosen(seed=1) == chosen(seed=1, max_samples=-1)[:10]
    assert sorted(chosen(seed=1, max_samples=1000)) == list(range(100))


def test_compressed_lines_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n{"a": 2}\n'))
    assert [row.values["a"] for row in load(str(tmp_path / "rows.jsonl.gz"))] == [1, 2]


def test_an_incomplete_compressed_file_is_rejected(tmp_path: Path) -> None:
    data = gzip.compress("".join(f'{{"a": {number**9}}}\n' for number in range(5000)).encode())
    (tmp_path / "rows.jsonl.gz").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=r"rows.jsonl.gz: not a readable .gz file"):
        load(str(tmp_path / "rows.jsonl.gz"))


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\u0085d\x0be"
    (tmp_path / "rows.jsonl").write_text(json.dumps({"a": text}, ensure_ascii=False) + '\n{"a": "z"}\n', "utf-8")
    assert [(row.place[-6:], row.values["a"]) for row in load(str(tmp_path / "rows.jsonl"))] == [
        ("line 1", text),
        ("line 2", "z"),
    ]


def test_a_line_that_is_not_utf8_is_a_fault_of_that_line_only(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": 1}\n{"a": "\xff"}\n{"a": 3}\n')
    with pytest.raises(ConfigError, match=r"1 bad row\n.*line 2: not UTF-8 .byte 8."):
        load(str(tmp_path / "rows.jsonl"))


def test_nested_columns_lists_maps_and_nulls_become_plain_values(tmp_path: Path) -> None:
    kind = pyarrow.struct([("b", pyarrow.list_(pyarrow.struct([("c", pyarrow.int32())])))])
    table = pyarrow.table(
        {
            "a": pyarrow.array([{"b": [{"c": 1}, None]}, None], kind),
            "m": pyarrow.array([[("x", 1)], None], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
            "d": pyarrow.array(["p", "p"]).dictionary_encode(),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert [row.values for row in load(str(tmp_path / "rows.parquet"))] == [
        {"a": {"b": [{"c": 1}, None]}, "m": {"x": 1}, "d": "p"},
        {"a": None, "m": None, "d": "p"},
    ]


def test_rows_know_their_entry(write: Callable[..., str]) -> None:
    first, second = write({"a": 1}, {"a": 2}, name="first.jsonl"), write({"a": 3}, name="second.jsonl")
    faults = Faults(KEY)
    rows = load_rows([first, second], faults, key=KEY, max_samples=-1, shuffle=True, seed=3)
    assert sorted((row.entry, row.values["a"]) for row in rows) == [(0, 1), (0, 2), (1, 3)]


def test_an_object_over_several_lines_is_one_fault(write: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps({"a": 1, "b": [1, 2]}, indent=2))
    with pytest.raises(
        ConfigError, match=r"1 bad row\n.*line 1: an object over several lines; write one object per line, or a list"
    ):
        load(str(tmp_path / "rows.json"))


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ('"\\ud83d x"', r"not readable .half a character: the surrogate .ud83d is unpaired"),
        ("9" * 5000, "not readable .*5000 digits"),
        ("[" * 100_000, "not readable .*recursion"),
    ],
)
def test_valid_json_that_cannot_be_processed_is_a_fault_of_its_line(tmp_path: Path, value: str, fault: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"a": "\\ud83d\\ude00"}}\n{{"a": {value}}}\n')
    with pytest.raises(ConfigError, match=rf"1 bad row\n.*line 2: {fault}"):
        load(str(tmp_path / "rows.jsonl"))


def test_a_file_with_the_query_of_its_download_is_proposed_and_read(tmp_path: Path, write: Callable[..., str]) -> None:
    file = write({"a": 1}, name="train.jsonl?download=true")
    write({"a": 1}, name="train2.jsonl")
    with pytest.raises(ConfigError, match=r"did you mean train\.jsonl\?download=true\?"):
        row_files([str(tmp_path / "train.jsonl")])
    assert [row.values for row in load(file)] == [{"a": 1}]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(ConfigError) as error:
        load(str(tmp_path / name))
    assert str(error.value).endswith("git lfs pull")
