import json
import os
import pickle
import shutil
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from hybridrl.checkpoint.read import open_tensors
from hybridrl.checkpoint.tensors import Unreadable
from hybridrl.config import ConfigError
from tests.checkpoint.shards import save_in_shards, whole_model
from tests.compat.verl.files import qwen2
from tests.core.training.on_ranks import on_ranks

RANKS = (2, 3)
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A model in shards, saved by each number of ranks."""
    directory = tmp_path_factory.mktemp("shards")
    for ranks in RANKS:
        on_ranks(ranks, save_in_shards, directory / str(ranks), qwen2())
    return directory


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    """Shards to damage."""
    return shutil.copytree(saved / "2", tmp_path / "copy")


def expected() -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in whole_model(qwen2()).named_parameters()}


def assert_equal(directory: Path, model: dict[str, Tensor]) -> None:
    tensors = open_tensors(directory)
    assert tensors.meta.keys() == model.keys()
    for name, value in model.items():
        assert (tensors.meta[name].shape, tensors.meta[name].dtype) == (value.shape, value.dtype)
        assert torch.equal(tensors.read(name), value), name


@pytest.mark.parametrize("ranks", RANKS)
def test_shards_of_any_number_of_ranks_are_assembled(saved, ranks):
    assert_equal(saved / str(ranks), expected())


def test_only_the_model_of_a_checkpoint_is_opened(saved):
    assert not any("exp_avg" in name or "updates" in name for name in open_tensors(saved / "2").meta)


def test_reading_returns_a_copy(saved):
    tensors = open_tensors(saved / "2")
    tensors.read("model.norm.weight").zero_()
    assert torch.equal(tensors.read("model.norm.weight"), expected()["model.norm.weight"])


@pytest.mark.parametrize("several", [False, True], ids=["one file", "several files"])
def test_a_hugging_face_directory_is_read(tmp_path, several):
    model = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4, dtype=torch.bfloat16), "c": torch.tensor(5)}
    files = {name: f"{name}.safetensors" if several else FILE for name in model}
    for file in set(files.values()):
        save_file({name: value for name, value in model.items() if files[name] == file}, tmp_path / file)
    if several:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    assert_equal(tmp_path, model)


def test_weights_saved_only_as_a_hugging_face_directory_are_read(tmp_path):
    (tmp_path / "huggingface").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "huggingface" / FILE)
    assert_equal(tmp_path, {"a": torch.ones(2)})


def test_shards_without_a_model_are_rejected(copy):
    on_ranks(1, dcp.save, {"extra": {"updates": 3}}, checkpoint_id=copy)
    with pytest.raises(ConfigError, match="holds no saved model"):
        open_tensors(copy)


def test_a_checkpoint_is_rejected_with_the_path_of_the_model_in_it(copy, tmp_path):
    copy.rename(tmp_path / "actor")
    with pytest.raises(ConfigError, match=rf"holds no saved model; name the model in it, {tmp_path / 'actor'}"):
        open_tensors(tmp_path)


def test_a_missing_directory_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="nowhere is not a directory"):
        open_tensors(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("damage", "reason"), [(Path.unlink, "No such file"), (lambda file: os.truncate(file, 100), "")]
)
def test_a_missing_or_truncated_file_of_a_rank_is_named(copy, damage, reason):
    damage(copy / "__1_0.distcp")
    tensors = open_tensors(copy)
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        with pytest.raises(Unreadable, match=rf"__1_0\.distcp cannot be read: .*{reason}"):
            tensors.read(name)


@pytest.mark.parametrize("size", [0, 10, 1000], ids="{} bytes".format)
def test_truncated_metadata_is_named(copy, size):
    os.truncate(copy / ".metadata", size)
    with pytest.raises(Unreadable, match=r"\.metadata cannot be read"):
        open_tensors(copy)


def test_metadata_that_lacks_shards_is_reported(copy):
    metadata: Any = dcp.FileSystemReader(copy).read_metadata()
    metadata.state_dict_metadata["model.model.norm.weight"].chunks.pop()
    with (copy / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)
    with pytest.raises(Unreadable, match=r"model\.norm\.weight cannot be read: 5 of its 10 elements were saved"):
        open_tensors(copy).read("model.norm.weight")


class PythonOf2023(pickle.Pickler):
    """Pickles members of enumerations as Python 3.11.2 does; later versions name their values."""

    def reducer_override(self, value: object) -> object:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_metadata_that_python_3_11_2_wrote_is_read(copy):
    metadata = dcp.FileSystemReader(copy).read_metadata()
    with (copy / ".metadata").open("wb") as file:
        PythonOf2023(file).dump(metadata)
    assert b"getattr" in (copy / ".metadata").read_bytes()
    assert_equal(copy, expected())


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(os.system),
        b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nMetadata\nV__init__\ntR.",
        b"cbuiltins\ngetattr\n(cpathlib\nPosixPath\nVcwd\ntR.",
    ],
    ids=["a function", "a method of a class", "a function of a class"],
)
def test_metadata_that_names_anything_else_is_rejected(copy, content):
    (copy / ".metadata").write_bytes(content)
    with pytest.raises(Unreadable, match=r"\.metadata cannot be read: it .* is not part of a checkpoint's metadata"):
        open_tensors(copy)


def test_a_truncated_file_of_safetensors_is_named(tmp_path):
    save_file({"a": torch.ones(20)}, tmp_path / FILE)
    os.truncate(tmp_path / FILE, 100)
    with pytest.raises(Unreadable, match=rf"{FILE} cannot be read"):
        open_tensors(tmp_path)


def test_a_missing_file_of_the_index_is_named(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(Unreadable, match=rf"two.safetensors is missing, which {INDEX} names"):
        open_tensors(tmp_path)


def test_of_a_run_s_directory_the_newest_checkpoint_is_named(tmp_path):
    for step in (9, 10):
        (tmp_path / f"global_step_{step}" / "actor").mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"name a model of the newest, {tmp_path}/global_step_10/actor"):
        open_tensors(tmp_path)


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    (tmp_path / FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(Unreadable, match=r"model\.safetensors cannot be read: it is a Git LFS pointer.*git lfs pull"):
        open_tensors(tmp_path)
