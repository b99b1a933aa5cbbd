"""What names of rows lead to. The hub is a directory that the library's own functions are made to take for it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from hybridrl.config.error import ConfigError
from hybridrl.data import files, hub
from hybridrl.data.rows import Faults, load_rows

TRAIN, VALIDATION = "data.train_files", "data.val_files"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    datasets.disable_progress_bars()


def texts(*entries: Any, key: str = TRAIN) -> list[str]:
    faults = Faults(key)
    rows = load_rows([str(entry) for entry in entries], faults, key=key, max_samples=-1, shuffle=False, seed=0)
    faults.close()
    return [row.values["a"] for row in rows]


def write(path: Path, *values: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"a": value}) + "\n" for value in values))
    return path


def test_a_pattern_names_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write(tmp_path / f"{name}.jsonl", name)
    (tmp_path / "a.txt").touch()
    assert texts(tmp_path / "*.jsonl") == ["a", "b", "c"]


def test_a_directory_without_splits_is_all_of_its_files(tmp_path: Path) -> None:
    write(tmp_path / "two.jsonl", "2")
    write(tmp_path / "one.jsonl", "1")
    assert texts(tmp_path) == ["1", "2"]


def test_of_a_directory_with_splits_training_takes_train_and_validation_must_say(tmp_path: Path) -> None:
    write(tmp_path / "data" / "train-0.jsonl", "x")
    write(tmp_path / "data" / "test-0.jsonl", "y")
    assert texts(tmp_path) == ["x"]
    assert texts(f"{tmp_path}:test") == ["y"]
    with pytest.raises(ConfigError, match=rf"has several splits; name one: {tmp_path}:train, {tmp_path}:test"):
        texts(tmp_path, key=VALIDATION)
    with pytest.raises(ConfigError, match=rf"has no split dev; name one: {tmp_path}:train"):
        texts(f"{tmp_path}:dev")


def test_rows_of_a_directory_keep_their_own_fields_and_types(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"a": "1"}\n{"a": [1, 2], "b": null}\n{"a": {"c": 1}}\n')
    assert texts(tmp_path) == ["1", [1, 2], {"c": 1}]


def test_what_datasets_saved_is_read_with_and_without_splits(tmp_path: Path) -> None:
    one, two = (datasets.Dataset.from_list([{"a": text}]) for text in ("x", "y"))
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=one, test=two).save_to_disk(str(tmp_path / "both"))
    assert texts(tmp_path / "one") == ["x"]
    assert texts(tmp_path / "both") == ["x"]
    assert texts(f"{tmp_path / 'both'}:test", key=VALIDATION) == ["y"]


@pytest.fixture
def hub_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A data set acme/sums, whose files lie in a directory here."""
    place = tmp_path / "hub"
    write(place / "train.jsonl", "x")
    write(place / "test.jsonl", "y")
    for name in ("load_dataset", "load_dataset_builder"):
        real = getattr(datasets, name)

        def local(path: str, *arguments: Any, real: Any = real, **more: Any) -> Any:
            if path != "acme/sums":
                raise ConnectionError(f"Couldn't reach '{path}' on the Hub")
            return real(str(place), *arguments, **more)

        monkeypatch.setattr(datasets, name, local)
    monkeypatch.chdir(tmp_path)
    hub.files_of_hub.cache_clear()


@pytest.mark.usefixtures("hub_of_one")
def test_a_data_set_of_the_hub_is_named_with_or_without_its_split() -> None:
    assert texts("acme/sums") == ["x"]
    assert texts("acme/sums:test") == ["y"]
    with pytest.raises(ConfigError, match="has several splits; name one: acme/sums:train, acme/sums:test"):
        texts("acme/sums", key=VALIDATION)


@pytest.mark.usefixtures("hub_of_one")
def test_a_name_that_is_nowhere_is_refused_with_the_hubs_reason() -> None:
    with pytest.raises(
        ConfigError, match=r"acme/nothing: neither a file here nor a data set that the hub gives .Couldn't"
    ):
        texts("acme/nothing")


def test_a_data_sets_files_are_those_that_a_run_is_recognised_by(tmp_path: Path) -> None:
    file = write(tmp_path / "train.jsonl", "x")
    assert files.row_files([str(tmp_path), str(file)], TRAIN) == [[file], [file]]


def test_of_a_directory_a_kind_of_file_that_is_no_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a\n1\n")
    with pytest.raises(ConfigError, match=r"train.csv: files of rows end in .parquet"):
        texts(tmp_path)


def test_a_table_of_the_arrow_kind_is_read_like_one_of_parquet(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([{"a": "x", "b": {"c": [1, None]}}])
    with pyarrow.OSFile(str(tmp_path / "rows.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert texts(tmp_path / "rows.arrow") == texts(tmp_path / "rows.parquet") == ["x"]


def test_of_a_directory_with_several_kinds_it_is_said_which_are_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "a.jsonl", "x")
    write(tmp_path / "b.jsonl", "y")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"a": "z"}]), tmp_path / "c.parquet")
    assert texts(tmp_path) == ["x", "y"]
    assert f"data.train_files={tmp_path}: files that end in .parquet are not read" in caplog.text
