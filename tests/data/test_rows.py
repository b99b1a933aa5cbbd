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


@pytest.mark.parametrize("name", ["rows.parquet", "rows.json", "rows.jsonl"])
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
