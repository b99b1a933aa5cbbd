"""Which names of rows and models are accepted before anything is read."""

import gzip
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.config.files import (
    DatasetName,
    is_sharded,
    model_path,
    one_or_more,
    parse_dataset_name,
    resolve_model,
    row_entries,
)
from hybridrl.config.values import ValueFault


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
    assert row_entries([name]) is None


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
    assert row_entries([name]) == (fault, "", True)


def test_no_name_at_all_may_be_another_machines_shell_variable() -> None:
    fault = one_or_more([])
    assert fault is not None and fault.absent
    assert row_entries([]) is None


def test_a_name_is_taken_apart_into_configuration_and_split() -> None:
    assert parse_dataset_name("a/b") == DatasetName("a/b", None, None)
    assert parse_dataset_name("a/b:test") == DatasetName("a/b", None, "test")
    assert parse_dataset_name("a/b:main:test") == DatasetName("a/b", "main", "test")


@pytest.fixture(params=[".metadata", "model_world_size_2_rank_0.pt"], ids=["ours", "verl's"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The actor of a checkpoint, in shards."""
    actor = tmp_path / "global_step_7" / "actor"
    (actor / "huggingface").mkdir(parents=True)
    (actor / "huggingface" / "config.json").write_text("{}")
    (actor / request.param).touch()
    return actor


def test_of_a_saved_model_all_but_the_weights_lies_below_it(saved: Path) -> None:
    assert resolve_model(str(saved)) == saved / "huggingface"
    assert is_sharded(str(saved))


def test_a_hugging_face_directory_is_itself(saved: Path) -> None:
    below = saved / "huggingface"
    assert resolve_model(str(below)) == below and not is_sharded(str(below))
    (saved / "config.json").touch()
    assert resolve_model(str(saved)) == saved


def test_a_name_of_the_hub_is_left_as_it_is() -> None:
    assert str(resolve_model("Qwen/Qwen2.5-0.5B")) == "Qwen/Qwen2.5-0.5B"
    assert not is_sharded("Qwen/Qwen2.5-0.5B")


def test_a_saved_model_is_a_model_path(saved: Path) -> None:
    assert model_path(str(saved)) is None


def test_so_is_one_with_whole_weights_and_no_shards(saved: Path) -> None:
    next(path for path in saved.iterdir() if path.is_file()).unlink()
    assert "no weights" in str(model_path(str(saved)))
    (saved / "huggingface" / "model.safetensors").touch()
    assert model_path(str(saved)) is None


def test_a_saved_model_without_its_configuration_is_rejected(saved: Path) -> None:
    (saved / "huggingface" / "config.json").unlink()
    there = ", ".join(sorted(file.name for file in saved.iterdir()))
    cause = f"the directory has no config.json, so it is not a Hugging Face model (it has {there})"
    assert model_path(str(saved)) == ValueFault(cause)


def test_of_a_run_the_newest_model_is_named(saved: Path) -> None:
    for name in ("global_step_10/actor", "global_step_x/actor", "global_step_11/critic"):
        (saved.parents[1] / name).mkdir(parents=True)
    fault = model_path(str(saved.parents[1]))
    assert fault is not None and fault.cause == "it is the directory of a run"
    assert fault.fix.endswith(f"the newest one: {saved.parents[1]}/global_step_10/actor")


def test_a_file_under_the_address_of_a_download_is_named_without_the_query(tmp_path: Path) -> None:
    there, missing = tmp_path / "x.jsonl", tmp_path / "y.jsonl"
    there.touch()
    assert f"but there is {there}: name that" in str(row_entries([f"{there}?download=true"]))
    assert "without the query of its address" in str(row_entries([f"{missing}?download=true"]))


def test_the_folder_that_was_meant_is_named(saved: Path) -> None:
    below, above = model_path(str(saved / "huggingface")), model_path(str(saved.parent))
    assert (below and below.fix, above and above.fix) == (f"name that: {saved}", f"name one of them: {saved}")


ASKED = """
import json, os, sys
from hybridrl.config import load_ppo_config
from hybridrl.config.findings import ConfigError
try:
    load_ppo_config(sys.argv[1:])
    said = ""
except ConfigError as error:
    said = str(error)
libraries = [name for name in ("huggingface_hub", "transformers", "datasets") if name in sys.modules]
print(json.dumps([said, os.environ.get("HF_HUB_OFFLINE"), libraries]))
"""


@pytest.mark.parametrize("cached", [False, True], ids=["not cached", "cached"])
@pytest.mark.parametrize("away", [False, True], ids=["a hub", "no hub"])
def test_names_of_a_hub_that_is_away_are_rejected_at_once_unless_cached(tmp_path, away, cached):
    """Each library would retry for 23 s, for every file, also of what is cached."""
    for name in ("hub/models--Org--Model", "hub/models--Org--Words", "datasets/org___rows") if cached else ():
        (tmp_path / "home" / name).mkdir(parents=True)
    keys = ["data.train_files=Org/Rows", "actor_rollout_ref.model.path=Org/Model", "data.tokenizer=Org/Words"]
    known = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    with socket.create_server(("127.0.0.1", 0)) as hub:
        known |= {"HF_ENDPOINT": f"http://127.0.0.1:{1 if away else hub.getsockname()[1]}", "CUDA_VISIBLE_DEVICES": ""}
        known |= {"HF_HOME": str(tmp_path / "home")}
        printed = subprocess.check_output([sys.executable, "-c", ASKED, *keys], env=known, text=True)
    said, offline, libraries = json.loads(printed)
    assert libraries == [] and offline == ("1" if away else None)
    rejected = [line.partition(": neither a directory here nor in the hub's cache")[0] for line in said.splitlines()]
    assert sorted(rejected) == ([] if cached or not away else sorted(keys))
