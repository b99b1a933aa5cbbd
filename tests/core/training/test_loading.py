"""Models that are filled from files: unsharded or sharded over ranks, from any format they may be saved in."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridrl.checkpoint.export import export_settings, own_tensors, parts
from hybridrl.config.files import HUGGINGFACE
from hybridrl.core.batch import Batch
from hybridrl.core.training import loading
from hybridrl.core.training.fsdp import full_tensors, local, shard_and_fill
from hybridrl.core.training.layout import layout
from hybridrl.core.training.loading import layer_classes
from hybridrl.core.training.model import HOST, LanguageModel, blank_language_model, blank_value_model, check_log_probs
from hybridrl.core.training.packing import pack_rows
from hybridrl.core.training.state import state_of
from tests.core.training.families import FAMILIES, SPECIAL, load_language_model, load_value_model, model_config
from tests.core.training.on_ranks import on_ranks
from tests.core.training.test_state import fsdp_config


def load(path: Path | str, **options: object) -> LanguageModel:
    return load_language_model(model_config(str(path), **options), torch.float32)


def load_shard(path: str, shards: int | None = None, dtype: str = "float32"):
    """A rank's part of the model, as a run loads it."""
    ranks, config = dist.get_world_size(), fsdp_config(dtype=dtype)
    blank = blank_language_model(model_config(path), torch.float32)
    return shard_and_fill(blank, path, config, layout("cpu", ranks, shards or ranks), HOST)


# -- on the ranks ------------------------------------------------------------------------------------------------------


def sharded_log_probs(path: str, rows: Batch, shards: int | None = None) -> tuple[Tensor, dict[str, int]]:
    """Log-probs of the rows, and how many parameters this rank holds and the model has."""
    model = load_shard(path, shards)
    held = {
        "here": sum(local(p).numel() for p in model.parameters()),
        "model": sum(p.numel() for p in model.parameters()),
    }
    with torch.no_grad():
        actual = model(pack_rows(rows, padded=False), 1.0).log_probs
        held["gathered"] = sum(p.numel() for p in model.parameters())  # as the forward pass leaves it
        check_log_probs(model, torch.float32, padded=False)
    return actual, held


def elements_read(path: str) -> tuple[int, int]:
    """How many numbers this rank reads from files, and how many the model has."""
    counted = Counter()
    read = loading.Weight.__getitem__

    def counting(weight: loading.Weight, region: object) -> Tensor:
        actual = read(weight, region)
        counted["read"] += actual.numel()
        return actual

    loading.Weight.__getitem__ = counting
    model = load_shard(path)
    return counted["read"], sum(parameter.numel() for parameter in model.parameters())


def saved_and_read(path: str, rows: Batch, directory: Path) -> Tensor:
    """Log-probs of a model that is read from where it was written as a run saves it."""
    model = load_shard(path)
    dcp.save(state_of(model, None, ["model"]), checkpoint_id=directory)
    if dist.get_rank() == 0:
        export_settings(model.model, directory / HUGGINGFACE, torch.float32)
    dist.barrier()
    return sharded_log_probs(str(directory), rows)[0]


def published(path: str) -> dict[str, Tensor]:
    """What is synchronised and written: every tensor unsharded, under its published name."""
    model = load_shard(path).model
    return dict(full_tensors(model, parts(model, torch.float32)))


def each_family(paths: dict[str, str], rows: Batch) -> dict[str, tuple[Tensor, dict[str, int], dict[str, Tensor]]]:
    return {family: (*sharded_log_probs(path, rows), published(path)) for family, path in paths.items()}


def critic_head(path: str) -> tuple[Tensor, bool]:
    blank = blank_value_model(model_config(path), torch.float32)
    model = shard_and_fill(
        blank, path, fsdp_config(), layout("cpu", dist.get_world_size(), dist.get_world_size()), HOST
    )
    head = model.model.get_submodule(model.head_name).weight
    return head.full_tensor(), any(parameter.is_meta for parameter in model.parameters())


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(directories, rows):
    """The part of every family that each of two ranks has."""
    return on_ranks(2, each_family, directories, rows)


@pytest.mark.parametrize("family", FAMILIES | SPECIAL)
def test_ranks_that_read_their_shards_have_the_full_model_together(directories, ranks, family, rows):
    model = load(directories[family])
    numbers = sum(parameter.numel() for parameter in model.parameters())
    for actual, held, _ in (rank[family] for rank in ranks):
        torch.testing.assert_close(actual, model(pack_rows(rows, padded=False), 1.0).log_probs, atol=1e-5, rtol=0)
        assert held["here"] < 0.6 * numbers
        # A tied head is not gathered twice; only the root's parameters are still gathered.
        assert held["gathered"] <= held["model"] == numbers


def test_replicas_of_the_model_are_read_in_full(directory, rows):
    actual = on_ranks(2, sharded_log_probs, directory, rows, shards=1)
    assert torch.equal(actual[0][0], actual[1][0])
    assert all(held["here"] == held["model"] for _, held in actual)


@pytest.mark.parametrize("family", ["two heads a key", "experts"])
def test_every_number_is_read_once_by_the_rank_that_keeps_it(directories, family):
    actual = on_ranks(2, elements_read, directories[family])
    assert sum(read for read, _ in actual) == actual[0][1]


@pytest.mark.parametrize("family", ["all heads one key, tied head", *SPECIAL])
def test_what_is_published_is_what_transformers_saved(directories, ranks, family):
    expected = load_file(Path(directories[family]) / "model.safetensors")
    _, _, actual = ranks[0][family]
    assert actual.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in actual.items())


@pytest.mark.parametrize("family", ["experts", "experts selected with a bias buffer"])
def test_a_checkpoint_is_read_too(directories, family, rows, tmp_path):
    actual, _ = on_ranks(2, saved_and_read, directories[family], rows, tmp_path)
    model, again = load(directories[family]), load(tmp_path)
    assert all(torch.equal(value, own_tensors(again.model)[name]) for name, value in own_tensors(model.model).items())
    torch.testing.assert_close(actual, model(pack_rows(rows, padded=False), 1.0).log_probs, atol=1e-5, rtol=0)


@pytest.fixture
def copy(directory, tmp_path):
    """Copy a model, and change settings in its configuration."""

    def make(of: str = directory, **changes: object) -> Path:
        path = shutil.copytree(of, tmp_path / "model")
        settings = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(settings | changes))
        return path

    return make


def test_pickled_weights_are_read_too(directory, copy):
    path = copy()
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    actual, expected = (load(one).state_dict() for one in (path, directory))
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_weights_do_not_change_when_their_file_is_overwritten(copy):
    path = copy()
    model = load(path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(2000)
        file.write(b"\xff" * 2000)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_tied_head_that_was_saved_too_is_tied(directories, copy):
    path = copy(directories["all heads one key, tied head"])
    weights = load_file(path / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, path / "model.safetensors")
    model = load(path).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_critic_of_a_language_model_starts_with_a_head_of_zeros_on_every_rank(directory):
    for head, unread in on_ranks(2, critic_head, directory):
        assert head.shape == (1, 32) and not head.any() and not unread
    assert not any(parameter.is_meta for parameter in load_value_model(model_config(directory), None).parameters())


def test_weights_of_another_shape_are_rejected_by_name(copy):
    path = copy(intermediate_size=40)
    with pytest.raises(ValueError, match=r"6 of the model's weights have another shape \(.*\[32, 48\] for \[32, 40\]"):
        load(path)


def test_layers_to_shard_are_detected_if_the_model_does_not_name_them_and_wrong_ones_rejected(directory):
    model = load(directory).model
    assert layer_classes(model) == {"Qwen2DecoderLayer"}
    assert layer_classes(model, ["Qwen2MLP", "Qwen2Attention"]) == {"Qwen2MLP", "Qwen2Attention"}
    model._no_split_modules = None
    assert layer_classes(model, []) == {"Qwen2DecoderLayer"}
    with pytest.raises(ValueError, match=r"layer_cls_to_wrap=LlamaDecoderLayer: .* it has Qwen2DecoderLayer"):
        layer_classes(model, ["LlamaDecoderLayer"])


CUSTOM_MODEL = """
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

from .configuration_own import OwnConfig


class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("halves", torch.full((config.hidden_size,), 0.5), persistent=False)
"""
CUSTOM_CONFIG = """
from transformers import Qwen2Config


class OwnConfig(Qwen2Config):
    model_type = "own"
"""


@pytest.fixture
def own(copy) -> Path:
    """A model with custom code."""
    classes = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    path = copy(model_type="own", auto_map=classes)
    (path / "modeling_own.py").write_text(CUSTOM_MODEL)
    (path / "configuration_own.py").write_text(CUSTOM_CONFIG)
    return path


def test_a_model_with_custom_code_is_loaded_and_saved_with_it_if_trusted(own, tmp_path):
    model = load(own, trust_remote_code=True).model
    assert type(model).__name__ == "OwnForCausalLM"
    assert torch.equal(model.halves, torch.full((32,), 0.5))
    assert layer_classes(model, []) == {"Qwen2DecoderLayer"}
    export_settings(model, tmp_path / "saved", torch.float32)
    assert {"modeling_own.py", "configuration_own.py"} <= {path.name for path in (tmp_path / "saved").iterdir()}
    save_file(own_tensors(model), tmp_path / "saved" / "model.safetensors", {"format": "pt"})
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert type(again).__name__ == "OwnForCausalLM"


def test_custom_code_that_is_not_trusted_is_rejected(own):
    with pytest.raises(ValueError, match="trust_remote_code"):
        load(own)


def test_a_library_is_imported_before_the_model_is_made(copy, tmp_path):
    (tmp_path / "registered.py").write_text(
        "from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM\n"
        "class RegisteredConfig(Qwen2Config): model_type = 'registered'\n"
        "class RegisteredForCausalLM(Qwen2ForCausalLM): config_class = RegisteredConfig\n"
        "AutoConfig.register('registered', RegisteredConfig)\n"
        "AutoModelForCausalLM.register(RegisteredConfig, RegisteredForCausalLM)\n"
    )
    model = load(copy(model_type="registered"), external_lib=[str(tmp_path / "registered.py")]).model
    assert type(model).__name__ == "RegisteredForCausalLM"
