"""Which names of rows are accepted before anything is read."""

import gzip
from pathlib import Path

import pytest

from hybridrl.config.row_files import Named, RowFiles, taken_apart
from hybridrl.config.values import Absent


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text("{}\n")
    (tmp_path / "data" / "b.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))


@pytest.mark.parametrize(
    "name",
    [
        "data/a.jsonl",
        "data",
        "data:train",
        "data/*.jsonl*",
        "data/**/a.*",
        "owner/name",
        "owner/name:test",
        "a-b/c.d:x:y",
    ],
)
def test_what_is_there_and_what_the_hub_may_have_is_accepted(name: str) -> None:
    assert RowFiles().fault([name]) is None


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("data/c.jsonl", "there is no file data/c.jsonl (in data there are a.jsonl, b.jsonl.gz)"),
        ("data/*.parquet", "no file matches data/*.parquet"),
        ("data/train", "there is no file data/train (in data there are a.jsonl, b.jsonl.gz)"),
        ("a/b/c", "there is no file a/b/c (a does not exist)"),
        ("/no/such.parquet", "there is no file /no/such.parquet (/no does not exist)"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(name: str, fault: str) -> None:
    assert RowFiles().fault([name]) == fault


def test_no_name_at_all_may_be_another_machines_shell_variable() -> None:
    assert isinstance(RowFiles(least=1).fault([]), Absent)
    assert RowFiles().fault([]) is None


def test_a_name_is_taken_apart_into_configuration_and_split() -> None:
    assert taken_apart("a/b") == Named("a/b", None, None)
    assert taken_apart("a/b:test") == Named("a/b", None, "test")
    assert taken_apart("a/b:main:test") == Named("a/b", "main", "test")
