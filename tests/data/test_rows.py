import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from hybridrl.config.error import ConfigError
from hybridrl.data.rows import Faults, Row, load_rows

KEY = "data.train_files"
ROWS = [{"a": 1, "b": {"c": "x"}}, {"a": 2, "b": {"c": "y"}}]


def load(*files: str, max_samples: int = -1, shuffle: bool = False, seed: int = 0) -> list[Row]:
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


def test_files_follow_one_another_and_rows_are_counted_over_all_of_them(write: Callable[..., str]) -> None:
    first, second = write({"a": 1}, {"a": 2}, name="first.jsonl"), write({"a": 3}, name="second.jsonl")
    rows = load(first, second)
    assert [(row.number, row.values["a"]) for row in rows] == [(0, 1), (1, 2), (2, 3)]
    assert rows[2].place == f"{second}, line 1"


def test_a_row_keeps_its_own_fields_and_types_whatever_the_others_have(write: Callable[..., str]) -> None:
    rows = [
        {"truth": "1", "extra": {"index": 0}},
        {"truth": ["1", "2"], "extra": None},
        {"truth": 3, "extra": {"z": 1}},
    ]
    assert [row.values for row in load(write(*rows))] == rows


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('\ufeff{"a": 1}\r\n\r\n{"a": 2}\r\n', encoding="utf-8")
    assert load(str(tmp_path / "rows.jsonl"))[1].place.endswith("rows.jsonl, line 3")


def test_every_line_that_is_no_object_is_named_in_one_message(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a":\nnull\n[1]\n')
    with pytest.raises(ConfigError) as error:
        load(str(tmp_path / "rows.jsonl"))
    assert "3 bad rows" in str(error.value)
    assert "line 2: not JSON (Expecting value at column" in str(error.value)
    assert "line 3: not an object" in str(error.value)
    assert "line 4: not an object" in str(error.value)


def test_a_missing_file_is_named_with_the_nearest_one(tmp_path: Path, write: Callable[..., str]) -> None:
    write({"a": 1}, name="train.jsonl")
    with pytest.raises(ConfigError, match=r"data.train_files=.*trian.jsonl: .*did you mean train.jsonl\?"):
        load(str(tmp_path / "trian.jsonl"))


def test_another_kind_of_file_is_refused_with_the_kinds_that_are_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows.csv: files of rows end in .parquet, .json, .jsonl"):
        load(str(tmp_path / "rows.csv"))


@pytest.mark.parametrize("name", ["rows.parquet", "rows.json", "rows.jsonl", "rows.jsonl.gz", "rows.arrow"])
def test_a_broken_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"[\xff\x00 PAR")
    with pytest.raises(ConfigError, match=rf"data.train_files=.*{name}: not a readable"):
        load(str(tmp_path / name))


def test_a_file_without_rows_is_refused(write: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="there are no rows; name a file that holds some"):
        load(write())


def test_a_thousand_bad_rows_are_enough(write: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="1000 or more bad rows") as error:
        load(write(*range(2000)))
    assert str(error.value).count("\n") == 6
    assert "... and 995 more" in str(error.value)


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


def test_half_a_compressed_file_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress("".join(f'{{"a": {number**9}}}\n' for number in range(5000)).encode())
    (tmp_path / "rows.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"rows.jsonl.gz: not a readable .gz file"):
        load(str(tmp_path / "rows.jsonl.gz"))


def test_a_line_ends_where_json_says_and_not_where_unicode_does(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\u0085d\x0be"
    (tmp_path / "rows.jsonl").write_text(json.dumps({"a": text}, ensure_ascii=False) + '\n{"a": "z"}\n', "utf-8")
    assert [(row.place[-6:], row.values["a"]) for row in load(str(tmp_path / "rows.jsonl"))] == [
        ("line 1", text),
        ("line 2", "z"),
    ]


def test_one_line_that_is_not_utf8_is_named_and_not_the_whole_file(tmp_path: Path) -> None:
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


def test_rows_know_which_entry_they_are_of(write: Callable[..., str]) -> None:
    first, second = write({"a": 1}, {"a": 2}, name="first.jsonl"), write({"a": 3}, name="second.jsonl")
    faults = Faults(KEY)
    rows = load_rows([first, second], faults, key=KEY, max_samples=-1, shuffle=True, seed=3)
    assert sorted(zip(rows.entries.tolist(), (row.values["a"] for row in rows), strict=True)) == [
        (0, 1),
        (0, 2),
        (1, 3),
    ]
    assert rows.entries.tolist() == [row.entry for row in rows]


def test_an_object_over_several_lines_is_one_fault(write: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps({"a": 1, "b": [1, 2]}, indent=2))
    with pytest.raises(
        ConfigError, match=r"1 bad row\n.*line 1: an object over several lines; write one a line, or a list"
    ):
        load(str(tmp_path / "rows.json"))


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ('"\\ud83d x"', r"not readable .half a character: .ud83d stands alone"),
        ("9" * 5000, "not readable .*5000 digits"),
        ("[" * 100_000, "not readable .*recursion"),
    ],
)
def test_what_json_may_hold_but_nothing_can_take_is_a_fault_of_its_line(tmp_path: Path, value: str, fault: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"a": "\\ud83d\\ude00"}}\n{{"a": {value}}}\n')
    with pytest.raises(ConfigError, match=rf"1 bad row\n.*line 2: {fault}"):
        load(str(tmp_path / "rows.jsonl"))
