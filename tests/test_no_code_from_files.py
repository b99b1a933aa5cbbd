"""Files made to run code where they are read: a checkpoint of ours or of verl's, a Hugging Face model, data."""

import json
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from jinja2 import TemplateError
from safetensors.torch import save_file
from torch.distributed.checkpoint import metadata
from transformers import Qwen2Tokenizer

from hybridrl.checkpoint.read import PlainPlanner, ShardReader, check_parts, open_tensors
from hybridrl.checkpoint.tensors import Unreadable
from hybridrl.compat.verl.checkpoint import data_position, verl_faults
from hybridrl.config import ConfigError
from hybridrl.core.training.loading import open_weights
from hybridrl.data.rows import Faults, load_rows
from hybridrl.data.tokenizer import Chat, render
from hybridrl.model_merger.__main__ import main as merge
from tests.compat.verl.files import qwen2


class Touch:
    """Pickled, it is a call that leaves a file behind."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


@pytest.fixture
def touch(tmp_path: Path):
    """What must not run, and after the test has not."""
    trace = tmp_path / "trace"
    pickle.loads(pickle.dumps(Touch(trace)))
    assert trace.exists(), "it would leave a trace"
    trace.unlink()
    yield Touch(trace)
    assert not trace.exists(), "a file's code was run"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A model in shards of ours, with its settings."""
    dcp.save({"model": {"a": torch.ones(4)}, "extra": {"updates": 3}}, checkpoint_id=tmp_path / "actor", no_dist=True)
    qwen2().save_pretrained(tmp_path / "actor" / "huggingface")
    return tmp_path / "actor"


READERS: dict[str, Callable[[Path], object]] = {
    "a model's path": lambda directory: open_weights(str(directory)),
    "a resumed run": lambda directory: check_parts(directory, ["model", "extra"]),
    "the merger's reader": open_tensors,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_metadata_of_shards_that_names_a_function_is_rejected(shards, touch, read):
    (shards / ".metadata").write_bytes(pickle.dumps(metadata.Metadata({"model.a": touch})))
    with pytest.raises(Unreadable, match=r"\.metadata cannot be read: it names pathlib\.Path\.touch, which is not"):
        read(shards)


def test_metadata_that_is_something_else_is_rejected(shards):
    (shards / ".metadata").write_bytes(pickle.dumps({"model.a": torch.Size([1])}))
    with pytest.raises(Unreadable, match="it holds no metadata of a checkpoint"):
        open_tensors(shards)


@pytest.mark.parametrize("path", ["../elsewhere.distcp", "/etc/hostname"])
def test_metadata_that_names_a_file_elsewhere_is_rejected(shards, path):
    found = ShardReader(shards).read_metadata()
    for place in found.storage_data.values():
        place.relative_path = path
    (shards / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(Unreadable, match=f"it names a file outside its directory, '{path}'"):
        open_tensors(shards)


def test_a_value_that_is_no_tensor_is_loaded_without_what_it_names(shards, touch):
    plain = {"extra": {"updates": 0}}
    dcp.load(plain, storage_reader=ShardReader(shards), planner=PlainPlanner(), no_dist=True)
    assert plain == {"extra": {"updates": 3}}
    dcp.save({"extra": {"updates": touch}}, checkpoint_id=shards, no_dist=True)
    with pytest.raises(dist.checkpoint.CheckpointException, match="Weights only load failed"):
        dcp.load(plain, storage_reader=ShardReader(shards), planner=PlainPlanner(), no_dist=True)


def test_the_merger_rejects_such_shards(shards, touch, tmp_path, capsys):
    (shards / ".metadata").write_bytes(pickle.dumps(touch))
    assert merge(["merge", "--local_dir", str(shards), "--target_dir", str(tmp_path / "merged")]) == 1
    assert "names pathlib.Path.touch" in capsys.readouterr().err.replace("\n", " ")


def test_no_file_of_verls_runs(touch, tmp_path):
    actor = tmp_path / "global_step_2" / "actor"
    actor.mkdir(parents=True)
    for kind in ("model", "optim", "extra_state"):
        torch.save({"model.embed_tokens.weight": touch, "state": touch}, actor / f"{kind}_world_size_1_rank_0.pt")
    torch.save({"_num_yielded": touch}, actor.parent / "data.pt")
    qwen2().save_pretrained(actor / "huggingface")
    assert verl_faults(actor.parent) == []  # nothing is damaged
    with pytest.raises(ConfigError, match="is neither a tensor nor a DTensor"):
        open_weights(str(actor))
    with pytest.raises(ConfigError, match=r"data\.pt cannot be read"):
        data_position(actor.parent)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin"])
def test_pickled_weights_of_a_model_are_not_run(touch, tmp_path, name):
    torch.save({"model.embed_tokens.weight": touch}, tmp_path / name)
    with pytest.raises(Unreadable, match=f"{name} cannot be read: Weights only load failed"):
        open_weights(str(tmp_path))


def test_what_lies_next_to_the_weights_is_not_loaded(touch, tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin", "rng_state.pth"):
        torch.save(touch, tmp_path / name)
    assert open_weights(str(tmp_path)).keys() == {"a"}


TEMPLATES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.mkdir('%s') }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ (messages | attr('append')).__self__.__class__.__base__.__subclasses__() }}",
    "{% set _ = messages.append('x') %}",
    "{{ raise_exception.__globals__['os'].mkdir('%s') }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_reaches_nothing_but_its_messages(template, tmp_path):
    tokenizer = Qwen2Tokenizer(vocab={"a": 0}, merges=[])
    tokenizer.chat_template = template.replace("%s", str(tmp_path / "trace"))
    (outcome,) = render(tokenizer, [Chat([{"role": "user", "content": "a"}], [])], {}, add_generation_prompt=True)
    assert isinstance(outcome, TemplateError) or outcome == []
    assert not (tmp_path / "trace").exists()


def test_a_pickle_in_the_types_of_a_parquet_file_is_not_read(touch, tmp_path):
    arrow = {"name": "arrow.py_extension_type", "metadata": pickle.dumps(touch, protocol=0)}
    field = pa.field("prompt", pa.string(), metadata={f"ARROW:extension:{key}": arrow[key] for key in arrow})
    pyarrow.parquet.write_table(pa.table([pa.array(["a"])], schema=pa.schema([field])), tmp_path / "rows.parquet")
    assert rows_of(tmp_path / "rows.parquet") == [{"prompt": "a"}]


OUTSIDE = ["../elsewhere.safetensors", "/etc/hostname", "https://example.com/a", "inside/../../elsewhere", "link"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_of_weights_that_names_a_file_elsewhere_is_rejected(tmp_path, name):
    model = tmp_path / "model"
    (model / "inside").mkdir(parents=True)
    (model / "model.safetensors").touch()
    save_file({"a": torch.ones(2)}, tmp_path / "elsewhere.safetensors")
    (model / "link").symlink_to(tmp_path / "elsewhere.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    for read in (lambda: open_weights(str(model)), lambda: open_tensors(model)):
        with pytest.raises(Unreadable, match="it names a file outside its directory, '"):
            read()


def test_an_index_of_weights_in_the_cache_of_the_hub_names_its_blobs(tmp_path):
    for place in (blobs := tmp_path / "blobs", snapshot := tmp_path / "snapshots" / "a1"):
        place.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, blobs / "f00d")
    (snapshot / "model-1.safetensors").symlink_to("../../blobs/f00d")
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert open_weights(str(snapshot)).keys() == {"a"}


KEYS = {"key": "data.train_files", "max_samples": -1, "shuffle": False, "seed": 0}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [row.values for row in load_rows([str(path)], Faults("data.train_files"), **KEYS)]


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "name",
    [
        *("../private.jsonl", "{outside}/private.jsonl", "../*.jsonl", "link.jsonl", "https://example.com/a.jsonl"),
        *("hf://datasets/some/rows/a.jsonl", "zip://a.jsonl::../b.zip", "file:///etc/hostname"),
    ],
)
def test_a_description_of_a_dataset_that_names_rows_elsewhere_is_rejected(tmp_path, monkeypatch, name, file):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("an address was opened"))
    (directory := tmp_path / "rows").mkdir()
    for path in (tmp_path / "private.jsonl", directory / "a.jsonl"):
        path.write_text('{"prompt": "a"}\n')
    (directory / "link.jsonl").symlink_to(tmp_path / "private.jsonl")

    def described(path: str) -> None:
        named = [{"config_name": "default", "data_files": [{"split": "train", "path": path}]}]
        text = yaml.safe_dump({"license": "mit", "homepage": "https://example.com", "configs": named})
        (directory / file).write_text(text if file.endswith("yaml") else f"---\n{text}---\n# Rows\n")

    described(name.format(outside=tmp_path))
    with pytest.raises(ConfigError, match=r"^data.train_files=.*/rows: a file of the directory names .*, which is not"):
        rows_of(directory)
    described("a.jsonl")
    assert rows_of(directory) == [{"prompt": "a"}]


def test_a_saved_dataset_whose_state_names_rows_elsewhere_is_rejected(tmp_path):
    for name in ("private", "rows"):
        datasets.Dataset.from_list([{"prompt": name}]).save_to_disk(tmp_path / name)
    state = tmp_path / "rows" / "state.json"
    state.write_text(state.read_text().replace("data-00000", "../private/data-00000"))
    with pytest.raises(ConfigError, match=r"names .*private/data-00000.*, which is not below it"):
        rows_of(tmp_path / "rows")
