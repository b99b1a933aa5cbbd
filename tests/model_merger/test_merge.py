import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GenerationConfig,
    Glm4MoeConfig,
    Qwen3MoeConfig,
)

from hybridrl import __version__
from hybridrl.checkpoint.files import write_manifest
from hybridrl.checkpoint.tensors import Unreadable
from hybridrl.config import ConfigError
from hybridrl.model_merger.card import CARD
from hybridrl.model_merger.merge import REPORT, merge, write_model
from hybridrl.model_merger.source import (
    CheckFailed,
    MergeSource,
    check_in_transformers,
    check_tensors,
    compare_models,
    open_source,
)
from tests.checkpoint.own_code import CODE, save_with_code
from tests.checkpoint.shards import load_all, save_in_shards, whole_model
from tests.checkpoint.test_published import SMALL
from tests.compat.verl.files import qwen2, save_as_verl
from tests.core.training.on_ranks import on_ranks

FLOAT, HALF = torch.float32, torch.bfloat16
IDS = torch.arange(9)[None]
EXPERTS = SMALL | {"moe_intermediate_size": 8}  # transformers multiplies experts of 16 bytes and multiples of it


class SavedModel(NamedTuple):
    """A saved model and its tensors."""

    directory: Path
    model: dict[str, Tensor]


def save_all(top: Path) -> None:
    for tied in (False, True):
        save_in_shards(top / f"shards {tied}" / "actor", qwen2(tie_word_embeddings=tied))
        for form in ("fsdp1", "fsdp2"):
            save_as_verl(top / f"{form} {tied}" / "actor", form, tied=tied)
    save_in_shards(top / "shards False" / "critic", qwen2(num_labels=1), value=True)
    save_as_verl(top / "fsdp2 False" / "critic", "fsdp2", value=True)


@pytest.fixture(scope="module")
def top(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    on_ranks(2, save_all, directory)
    return directory


@pytest.fixture
def saved(top) -> Callable[..., SavedModel]:
    def find(form: str = "shards", name: str = "actor", *, tied: bool = False) -> SavedModel:
        directory = top / f"{form} {tied}" / name
        if form != "shards":
            return SavedModel(directory, torch.load(directory / "truth.pt")[0])
        model = whole_model(AutoConfig.from_pretrained(directory / "huggingface"), value=name == "critic")
        return SavedModel(directory, dict(model.state_dict()))

    return find


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    """A saved actor to damage."""
    return shutil.copytree(saved().directory, tmp_path / "step" / "actor")


@pytest.mark.parametrize("limit", [5 << 30, 700], ids=["one file", "several files"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied head", "own head"])
@pytest.mark.parametrize("form", ["shards", "fsdp1", "fsdp2"])
def test_transformers_loads_the_model_that_was_saved(saved, tmp_path, form, tied, limit):
    directory, model = saved(form, tied=tied)
    merge(open_source(directory), tmp_path / "merged", limit=limit)
    merged_model = load_all(AutoModelForCausalLM, tmp_path / "merged")
    expected = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory / "huggingface"))
    expected.load_state_dict(model)
    assert merged_model.dtype == (FLOAT if form == "shards" else HALF)
    assert torch.equal(merged_model.eval()(IDS).logits, expected.eval().to(merged_model.dtype)(IDS).logits)
    for file in (tmp_path / "merged").glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            assert "lm_head.weight" not in tensors.keys() or not tied  # noqa: SIM118
            assert limit > 700 or file.stat().st_size < 2000


@pytest.mark.parametrize("form", ["shards", "fsdp2"])
def test_a_value_model_is_merged(saved, tmp_path, form):
    directory, model = saved(form, "critic")
    merge(open_source(directory), tmp_path / "merged")
    merged_model = load_all(AutoModelForTokenClassification, tmp_path / "merged")
    assert merged_model.config.num_labels == 1
    assert merged_model.config.architectures == ["Qwen2ForTokenClassification"]
    expected = AutoModelForTokenClassification.from_config(merged_model.config)
    expected.load_state_dict(model)
    assert torch.equal(merged_model.eval()(IDS).logits, expected.eval().to(merged_model.dtype)(IDS).logits)


def test_a_mixture_of_experts_is_merged_under_its_published_names(tmp_path):
    config = Qwen3MoeConfig(**EXPERTS, num_experts=3)
    on_ranks(2, save_in_shards, tmp_path / "actor", config)
    report = merge(open_source(tmp_path / "actor"), tmp_path / "merged")
    assert "39 of 39 equal" in report["checked"]["tensors"]
    assert "model.layers.1.mlp.experts.2.up_proj.weight" in load_file(tmp_path / "merged" / "model.safetensors")
    merged_model = load_all(AutoModelForCausalLM, tmp_path / "merged")
    assert torch.equal(merged_model.eval()(IDS).logits, whole_model(config).eval()(IDS).logits)
    assert "39 tensors equal" in compare_models(open_source(tmp_path / "merged"), tmp_path / "merged")


def test_a_routers_buffer_keeps_its_type(tmp_path):
    groups = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    on_ranks(2, save_in_shards, tmp_path / "actor", Glm4MoeConfig(**EXPERTS, n_routed_experts=3, **groups))
    merge(open_source(tmp_path / "actor", HALF), tmp_path / "merged", {"t": check_in_transformers})
    types = {name: tensor.dtype for name, tensor in load_file(tmp_path / "merged" / "model.safetensors").items()}
    corrections = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert {name for name, kind in types.items() if kind == FLOAT} == {corrections}
    assert set(types.values()) == {FLOAT, HALF}


def test_a_critic_is_a_value_model_even_with_the_actors_configuration(saved):
    directory, _ = saved("fsdp2", "critic")
    assert json.loads((directory / "huggingface" / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    assert open_source(directory).is_value_model


@pytest.mark.parametrize("dtype", [HALF, torch.float16], ids=str)
def test_tensors_and_configuration_have_the_requested_type(saved, tmp_path, dtype):
    directory, model = saved()
    merge(open_source(directory, dtype), tmp_path / "merged")
    assert all(
        torch.equal(value, model[name].to(dtype)) and value.dtype == dtype
        for name, value in load_file(tmp_path / "merged" / "model.safetensors").items()
    )
    assert AutoConfig.from_pretrained(tmp_path / "merged").dtype == dtype


def open_as(form: str, directory: Path, computed_in: torch.dtype | None, *saved: torch.dtype) -> MergeSource:
    """Open a model whose tensors were saved in these types in turn, with the computing type in its configuration."""
    settings = qwen2()
    settings.dtype = computed_in
    settings.save_pretrained(directory / "huggingface")
    tensors = whole_model(settings).float().state_dict()
    tensors = {name: value.to(kind) for (name, value), kind in zip(tensors.items(), cycle(saved), strict=False)}
    if form == "verl":
        torch.save(tensors, directory / "model_world_size_1_rank_0.pt")
    else:
        save_file(tensors, directory / "model.safetensors")
    return open_source(directory)


@pytest.mark.parametrize(
    ("form", "computed_in", "saved", "merged"),
    [
        ("hybridrl", HALF, [FLOAT], HALF),
        ("hybridrl", FLOAT, [FLOAT], FLOAT),
        ("hybridrl", FLOAT, [HALF], HALF),  # a wider type would add nothing
        ("hybridrl", FLOAT, [HALF, FLOAT], FLOAT),
        ("hybridrl", None, [torch.float16], torch.float16),
        ("verl", FLOAT, [FLOAT], HALF),  # its configuration has the type of what is stored
        ("verl", FLOAT, [torch.float16], HALF),
    ],
)
def test_by_default_a_model_is_merged_in_the_type_it_computed_in(tmp_path, form, computed_in, saved, merged):
    source = open_as(form, tmp_path / "actor", computed_in, *saved)
    assert {tensor.dtype for tensor in source.meta.values()} == {merged}


def test_a_requested_type_is_used(tmp_path):
    open_as("verl", tmp_path / "actor", HALF, FLOAT)
    assert open_source(tmp_path / "actor", FLOAT).dtype == FLOAT


def test_the_other_files_of_the_huggingface_folder_are_copied(copy, tmp_path):
    save_file({"old": torch.ones(1)}, copy / "huggingface" / "model-00001-of-00002.safetensors")
    merge(open_source(copy, HALF), tmp_path / "merged")
    settings = copy / "huggingface"
    for name in ("chat_template.jinja", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (settings / name).read_bytes()
    assert GenerationConfig.from_pretrained(tmp_path / "merged").eos_token_id == [3, 5]
    before, after = (json.loads((place / "config.json").read_text()) for place in (settings, tmp_path / "merged"))
    assert after == before | {"dtype": "bfloat16"}
    assert [file.name for file in (tmp_path / "merged").glob("*.safetensors")] == ["model.safetensors"]


def test_the_report_lists_what_was_read_written_and_checked_and_the_versions(saved, tmp_path):
    directory, model = saved(tied=True)
    step = shutil.copytree(directory, tmp_path / "global_step_40" / "actor")
    report = merge(open_source(step, HALF), tmp_path / "merged")
    assert json.loads((tmp_path / "merged" / REPORT).read_text()) == report
    elements = sum(value.numel() for name, value in model.items() if name != "lm_head.weight")
    counts = {"tensors": len(model) - 1, "parameters": elements}
    assert report["source"] == {
        "directory": str(step),
        "step": 40,
        "form": "in shards",
        "bytes": 4 * elements,
        "types": "float32",
        **counts,
    }
    assert report["written"] == {
        "directory": str(tmp_path / "merged"),
        "model": "Qwen2ForCausalLM",
        "dtype": "bfloat16",
        "tied": {"lm_head.weight": "model.embed_tokens.weight"},
        "bytes": 2 * elements,
        "types": "bfloat16",
        **counts,
    }
    contents = {path.name: path.read_bytes() for path in (tmp_path / "merged").iterdir() if path.name != REPORT}
    assert report["files"] == {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    assert report["checked"] == {
        "source": "without manifest.json",
        "tensors": f"{len(model) - 1} of {len(model) - 1} equal bit for bit",
    }
    assert report["versions"]["torch"] == version("torch")
    assert report["versions"]["hybridrl"] == __version__
    assert report["seconds"].keys() == {"write", "check"}
    assert report["peak_memory_bytes"] > 1e8


def test_a_merge_has_a_card_which_the_report_lists_and_another_merge_replaces_unless_it_was_edited(saved, tmp_path):
    report = merge(open_source(saved().directory), tmp_path / "merged")
    card = tmp_path / "merged" / CARD
    assert "no record of its training" in card.read_text() and CARD in report["files"]
    merge(open_source(saved().directory), tmp_path / "merged")
    for text in ("mine", card.read_text().replace("no", "NO")):  # the second is as long as the merge's
        card.write_text(text)
        for _ in range(2):
            merge(open_source(saved().directory), tmp_path / "merged")
            assert card.read_text() == text
    (tmp_path / "merged" / REPORT).unlink()
    with pytest.raises(ConfigError, match="exists, and no merge wrote it"):
        merge(open_source(saved().directory), tmp_path / "merged")


def change_config(directory: Path, **changes: object) -> None:
    file = directory / "huggingface" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


LAYER = r"\(model\.layers\.{}\.self_attn\.q_proj\.weight, "


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, f"12 are missing {LAYER.format(2)}"),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, f"12 are not the model's {LAYER.format(1)}"),
        ({"vocab_size": 18}, r"2 are of another shape \(model.embed_tokens.weight: \[17, 10\] for \[18, 10\]"),
    ],
)
def test_tensors_that_are_missing_unknown_or_of_another_shape_are_named(copy, changes, message):
    change_config(copy, **changes)
    with pytest.raises(CheckFailed, match=message):
        open_source(copy)


def test_a_head_that_differs_from_the_tensor_it_is_tied_to_is_named(saved, tmp_path):
    copied = shutil.copytree(saved("fsdp2").directory, tmp_path / "actor")
    change_config(copied, tie_word_embeddings=True)
    with pytest.raises(CheckFailed, match=r"lm_head\.weight is saved with other values than model\.embed"):
        merge(open_source(copied), tmp_path / "merged")


def test_a_lora_adapter_is_rejected(copy):
    adapter = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 2)}
    (copy / ".metadata").unlink()
    save_file(adapter, copy / "adapter_model.safetensors")
    with pytest.raises(
        ConfigError, match=r"holds a LoRA adapter \(base_model.*lora_A.weight\), which cannot be merged yet; merge it"
    ):
        open_source(copy)


def test_a_model_without_a_configuration_is_rejected(copy):
    shutil.rmtree(copy / "huggingface")
    with pytest.raises(ConfigError, match=r"actor/config.json is missing, which describes the model; copy it from"):
        open_source(copy)


def test_custom_code_is_not_run_unless_it_is_trusted(copy):
    change_config(copy, model_type="mine", auto_map={"AutoConfig": "mine.Config"})
    (copy / "huggingface" / "mine.py").write_text("raise SystemExit('run')")
    with pytest.raises(ConfigError, match="--trust-remote-code runs custom code of the model"):
        open_source(copy)


def test_custom_code_is_copied(tmp_path):
    save_with_code(tmp_path / "actor" / "huggingface")
    merge(open_source(tmp_path / "actor", trusted=True), tmp_path / "merged", {"t": check_in_transformers})
    assert {path.name for path in (tmp_path / "merged").glob("*.py")} == set(CODE)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", trust_remote_code=True)
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "actor" / "huggingface", trust_remote_code=True)
    assert type(loaded).__name__ == "MineForCausalLM"
    assert torch.equal(loaded(IDS).logits, before(IDS).logits)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("name", ["thesis.tex", ""], ids=["a directory with other files", "a file in its place"])
def test_what_no_merge_wrote_is_rejected_and_not_changed(saved, tmp_path, name):
    place = tmp_path / "merged" / name
    place.parent.mkdir(exist_ok=True)
    place.write_text("mine")
    cause = rf"--target_dir=.*merged: {place} exists, and no merge wrote it; move it"
    with pytest.raises(ConfigError, match=cause):
        merge(open_source(saved().directory), tmp_path / "merged")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [place] and place.read_text() == "mine"


def test_an_edited_merge_is_rejected_and_not_changed(saved, tmp_path):
    source = open_source(saved().directory)
    merge(source, tmp_path / "merged")
    (tmp_path / "merged" / "config.json").write_text("mine")
    before = contents(tmp_path / "merged")
    with pytest.raises(ConfigError, match=r"config\.json exists, and no merge wrote it"):
        merge(source, tmp_path / "merged")
    assert contents(tmp_path / "merged") == before


def test_an_earlier_merge_is_restored_if_its_replacement_was_killed(copy, tmp_path):
    merge(open_source(copy), tmp_path / "merged")
    before = contents(tmp_path / "merged")
    (tmp_path / "merged").replace(tmp_path / ".merged.replaced")
    source = open_source(copy)
    (copy / "__1_0.distcp").unlink()
    with pytest.raises(Unreadable):
        merge(source, tmp_path / "merged")
    assert contents(tmp_path / "merged") == before


@pytest.mark.parametrize("before", ["nothing", "an empty directory", "an earlier merge"])
def test_a_merge_replaces_an_earlier_one_completely(saved, tmp_path, before):
    source = open_source(saved().directory)
    if before == "an empty directory":
        (tmp_path / "merged").mkdir()
    elif before == "an earlier merge":
        merge(source, tmp_path / "merged", limit=700)
    merge(source, tmp_path / "merged")
    assert [file.name for file in (tmp_path / "merged").glob("*.safetensors*")] == ["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_a_failed_merge_changes_nothing(copy, tmp_path):
    merge(open_source(copy), tmp_path / "merged")
    before = contents(tmp_path / "merged")
    source = open_source(copy, HALF)
    (copy / "__1_0.distcp").unlink()
    with pytest.raises(Unreadable, match=r"__1_0\.distcp"):
        merge(source, tmp_path / "merged")
    assert contents(tmp_path / "merged") == before
    assert {path.name for path in tmp_path.iterdir()} == {"merged", "step"}


def test_a_disk_that_fills_up_leaves_nothing_behind(saved, tmp_path, full_disk):
    source = open_source(saved().directory)
    full_disk(5000)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        merge(source, tmp_path / "merged")
    assert not list(tmp_path.iterdir())


def test_a_failed_check_leaves_nothing_behind(saved, tmp_path):
    def fails(source: MergeSource, directory: Path) -> str:
        assert (directory / "model.safetensors").is_file()
        raise CheckFailed("the outputs differ")

    with pytest.raises(CheckFailed, match="the outputs differ"):
        merge(open_source(saved().directory), tmp_path / "merged", {"mine": fails})
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_too_small_is_rejected_before_anything_is_written(saved, tmp_path, free_space):
    free_space(100)
    with pytest.raises(ConfigError, match=r"has 0\.0 GB free, and the model takes 0\.0; free some space"):
        merge(open_source(saved().directory), tmp_path / "merged")
    assert not list(tmp_path.iterdir())


def flip_last_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_file_that_changed_since_the_save_is_named(copy, tmp_path):
    write_manifest(copy.parent)
    flip_last_bit(copy / "__0_0.distcp")
    with pytest.raises(CheckFailed, match=r"actor/__0_0\.distcp: changed since it was .*; merge another checkpoint"):
        merge(open_source(copy), tmp_path / "merged")


def test_damage_to_other_models_of_a_checkpoint_is_ignored(copy, tmp_path):
    (copy.parent / "critic").mkdir()
    (copy.parent / "critic" / "file").write_text("complete")
    write_manifest(copy.parent)
    (copy.parent / "critic" / "file").unlink()
    merge(open_source(copy), tmp_path / "merged")


def test_a_changed_byte_in_a_file_of_verl_is_detected(saved, tmp_path):
    copied = shutil.copytree(saved("fsdp2").directory, tmp_path / "actor")
    content = bytearray((file := copied / "model_world_size_2_rank_1.pt").read_bytes())
    value = open_source(copied, FLOAT).tensors.read("model.norm.weight")[5:6]  # where the second rank's half begins
    content[content.index(value.numpy().tobytes())] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckFailed, match=r"model_world_size_2_rank_1\.pt: changed since it was written"):
        merge(open_source(copied), tmp_path / "merged")


def test_a_tensor_that_was_written_wrongly_is_named(saved, tmp_path):
    source = open_source(saved().directory)
    write_model(source, tmp_path / "written")
    assert check_tensors(source, tmp_path / "written") == "27 of 27 equal bit for bit"
    flip_last_bit(tmp_path / "written" / "model.safetensors")
    with pytest.raises(CheckFailed, match=r"1 tensors differ from what was read: lm_head\.weight"):
        check_tensors(source, tmp_path / "written")


def test_nan_equals_itself_and_zero_has_a_sign(tmp_path):
    (tmp_path / "actor").mkdir()
    model = whole_model(qwen2()).state_dict()
    model["model.norm.weight"].copy_(torch.tensor([float("nan"), -0.0] * 5))
    qwen2().save_pretrained(tmp_path / "actor" / "huggingface")
    torch.save(model, tmp_path / "actor" / "model_world_size_1_rank_0.pt")
    source = open_source(tmp_path / "actor")
    merge(source, tmp_path / "merged")
    model["model.norm.weight"].copy_(torch.tensor([float("nan"), 0.0] * 5))
    save_file(model, tmp_path / "merged" / "model.safetensors")
    with pytest.raises(CheckFailed, match=r"model\.norm\.weight differs by up to"):
        compare_models(source, tmp_path / "merged")


def save_large(directory: Path, form: str) -> None:
    """Save three tensors of 128 MiB."""
    tensors = {f"weight{number}": torch.full((256, 1 << 17), float(number)) for number in range(3)}
    if form == "shards":
        dcp.save({"model": tensors}, checkpoint_id=directory)
    else:
        directory.mkdir()
        torch.save(tensors, directory / "model_world_size_1_rank_0.pt")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["shards", "files of verl"])
def test_memory_does_not_grow_with_the_model(tmp_path, form):
    on_ranks(1, save_large, tmp_path / "actor", form)
    code = """
import sys
from pathlib import Path
from hybridrl.checkpoint.export import write_shards
from hybridrl.checkpoint.read import open_tensors

def kilobytes(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind))

tensors = open_tensors(Path(sys.argv[1]))
pieces = ((name, first, piece) for name in tensors.meta for first, piece in tensors.pieces(name))
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
before = kilobytes("VmRSS")
write_shards(Path(sys.argv[2]), tensors.meta, pieces, 5 << 30)
print((kilobytes("VmHWM") - before) / 1024)
"""
    command = [sys.executable, "-c", code, tmp_path / "actor", tmp_path]
    megabytes = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert megabytes < 64
    assert (load_file(tmp_path / "model.safetensors")["weight2"] == 2).all()
