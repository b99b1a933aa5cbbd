"""Entries of data.train_files and their files. A local directory stands in for the hub dataset."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from hybridrl.config.findings import ConfigError
from hybridrl.data import row_files as files
from hybridrl.data.rows import Faults, load_rows

TRAIN, VALIDATION = "data.train_files", "data.val_files"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_pattern_gives_its_files_sorted_by_name(tmp_path):
    for name in ("b", "a", "c"):
        write(tmp_path / f"{name}.jsonl", name)
    (tmp_path / "a.txt").touch()
    assert texts(tmp_path / "*.jsonl") == ["a", "b", "c"]


def test_a_directory_without_splits_gives_all_its_files(tmp_path):
    write(tmp_path / "two.jsonl", "2")
    write(tmp_path / "one.jsonl", "1")
    assert texts(tmp_path) == ["1", "2"]


def test_of_several_splits_training_takes_train_and_validation_must_name_one(tmp_path):
    write(tmp_path / "data" / "train-0.jsonl", "x")
    write(tmp_path / "data" / "test-0.jsonl", "y")
    assert texts(tmp_path) == ["x"]
    assert texts(f"{tmp_path}:test") == ["y"]
    with pytest.raises(ConfigError, match=rf"has several splits; name one: {tmp_path}:train, {tmp_path}:test"):
        texts(tmp_path, key=VALIDATION)
    with pytest.raises(ConfigError, match=rf"has no split dev; name one: {tmp_path}:train"):
        texts(f"{tmp_path}:dev")


def test_rows_of_a_directory_keep_their_fields_and_types(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"a": "1"}\n{"a": [1, 2], "b": null}\n{"a": {"c": 1}}\n')
    assert texts(tmp_path) == ["1", [1, 2], {"c": 1}]


def test_saved_datasets_are_read_with_and_without_splits(tmp_path):
    one, two = (datasets.Dataset.from_list([{"a": text}]) for text in ("x", "y"))
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=one, test=two).save_to_disk(str(tmp_path / "both"))
    assert texts(tmp_path / "one") == ["x"]
    assert texts(tmp_path / "both") == ["x"]
    assert texts(f"{tmp_path / 'both'}:test", key=VALIDATION) == ["y"]


@pytest.fixture
def hub_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Provide a hub dataset acme/sums, whose files are in a local directory."""
    directory = tmp_path / "hub"
    write(directory / "train.jsonl", "x")
    write(directory / "test.jsonl", "y")
    for name in ("load_dataset", "load_dataset_builder"):
        real = getattr(datasets, name)

        def local(path: str, *arguments: Any, real: Any = real, **more: Any) -> Any:
            if path != "acme/sums":
                raise ConnectionError(f"Couldn't reach '{path}' on the Hub")
            return real(str(directory), *arguments, **more)

        monkeypatch.setattr(datasets, name, local)
    monkeypatch.setattr(files, "hub_is_away", lambda: False)
    monkeypatch.chdir(tmp_path)
    files.files_of_hub.cache_clear()


@pytest.mark.usefixtures("hub_of_one")
def test_a_hub_dataset_is_named_with_or_without_its_split() -> None:
    assert texts("acme/sums") == ["x"]
    assert texts("acme/sums:test") == ["y"]
    with pytest.raises(ConfigError, match="has several splits; name one: acme/sums:train, acme/sums:test"):
        texts("acme/sums", key=VALIDATION)


@pytest.mark.usefixtures("hub_of_one")
def test_an_unknown_name_is_rejected_with_the_reason_from_the_hub() -> None:
    with pytest.raises(
        ConfigError, match=r"acme/nothing: neither a file here nor a dataset that can be loaded from the hub .Couldn't"
    ):
        texts("acme/nothing")


README = """---
configs:
- config_name: main
  data_files: [{split: train, path: main/train.jsonl}, {split: test, path: main/test.jsonl}]
- config_name: socratic
  data_files: [{split: train, path: socratic/train.jsonl}]
---
"""


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide acme/school in the hub's cache, as a download leaves it: links to blobs. The hub cannot be reached."""
    copy, commit = tmp_path / "datasets--acme--school", "0" * 40
    contents = {f"{name}.jsonl": json.dumps({"a": name}) for name in ("main/train", "main/test", "socratic/train")}
    for number, (name, text) in enumerate({"README.md": README, **contents}.items()):
        blob, link = copy / "blobs" / str(number), copy / "snapshots" / commit / name
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob.write_text(text)
        link.symlink_to(blob)
    (copy / "refs").mkdir()
    (copy / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(files, "hub_is_away", lambda: True)
    files.files_of_hub.cache_clear()


@pytest.mark.usefixtures("hub_cache")
def test_a_downloaded_dataset_is_read_from_the_hubs_cache_without_the_hub() -> None:
    assert texts("acme/school:main") == ["main/train"]
    assert texts("acme/school:main:test", key=VALIDATION) == ["main/test"]
    assert texts("acme/school:socratic", key=VALIDATION) == ["socratic/train"]


@pytest.mark.usefixtures("hub_cache")
@pytest.mark.parametrize(
    ("entry", "cause"),
    [
        ("acme/school", "school: has several configurations; name one: acme/school:main, acme/school:socratic"),
        ("acme/school:hard:train", "school: has no configuration hard; name one: acme/school:main, acme/school:socr"),
        ("acme/school:main:dev", "school:main: has no split dev; name one: acme/school:main:train, acme/school:main:t"),
    ],
)
def test_configurations_and_splits_are_listed_as_they_are_named(entry: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=f"data.train_files=acme/{cause}"):
        texts(entry)


def test_a_directory_and_its_file_give_the_same_files(tmp_path):
    file = write(tmp_path / "train.jsonl", "x")
    assert files.row_files([str(tmp_path), str(file)], TRAIN) == [[file], [file]]


def test_an_unsupported_file_type_in_a_directory_is_rejected(tmp_path):
    (tmp_path / "train.xml").write_text("<a>1</a>")
    with pytest.raises(ConfigError, match=r"train.xml: files of rows end in .parquet"):
        texts(tmp_path)


def test_a_directory_gives_its_csv_files_and_a_text_file_only_if_it_is_named(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.csv").write_text("a\n007\n")
    (tmp_path / "rows" / "test.csv").write_text("a\n008\n")
    assert texts(tmp_path / "rows") == ["007"] and texts(f"{tmp_path / 'rows'}:test") == ["008"]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "LICENSE.txt").write_text("All rights reserved.")
    with pytest.raises(ConfigError, match=r"LICENSE.txt: .*, and .txt must be named itself; name the file"):
        files.row_files([str(tmp_path / "texts")])
    assert files.row_files([str(tmp_path / "texts" / "*.txt")]) == [[tmp_path / "texts" / "LICENSE.txt"]]


def test_a_directory_gives_its_compressed_files(tmp_path):
    for name in ("train", "test"):
        (tmp_path / "rows").mkdir(exist_ok=True)
        (tmp_path / "rows" / f"{name}.csv.gz").write_bytes(gzip.compress(b"prompt\n" + name.encode()))
    assert files.row_files([str(tmp_path / "rows")], TRAIN) == [[tmp_path / "rows" / "train.csv.gz"]]


def test_arrow_files_are_read_like_parquet(tmp_path):
    table = pyarrow.Table.from_pylist([{"a": "x", "b": {"c": [1, None]}}])
    with pyarrow.OSFile(str(tmp_path / "rows.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert texts(tmp_path / "rows.arrow") == texts(tmp_path / "rows.parquet") == ["x"]


def test_a_warning_names_the_file_types_of_a_directory_that_are_not_read(tmp_path, caplog):
    write(tmp_path / "a.jsonl", "x")
    write(tmp_path / "b.jsonl", "y")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"a": "z"}]), tmp_path / "c.parquet")
    assert texts(tmp_path) == ["x", "y"]
    assert f"data.train_files={tmp_path}: files that end in .parquet are not read" in caplog.text
