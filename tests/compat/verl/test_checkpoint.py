import os
import shutil
import warnings
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

from hybridrl.checkpoint.read import open_tensors
from hybridrl.checkpoint.tensors import Unreadable
from hybridrl.compat.verl.checkpoint import DataPosition, VerlReader, data_position, verl_faults
from hybridrl.config import ConfigError
from tests.compat.verl.files import TRUTH, UPDATES, save_as_verl
from tests.core.training.on_ranks import on_ranks

FORMS = {
    "fsdp2": 3,
    "fsdp2 one rank": 1,
    "fsdp2 columns": 2,
    "fsdp2 replicated": 4,
    "fsdp1": 3,
    "fsdp1 one rank": 1,
    "fsdp1 replicated": 4,
    "fsdp1 original parameters": 3,
    "fsdp1 sharded tensors": 3,
}
STEP = "global_step_7"


def save_all(directory: Path, forms: list[str]) -> None:
    for form in forms:
        save_as_verl(directory / form / STEP / "actor", form)
        save_as_verl(directory / f"{form} tied" / STEP / "actor", form, tied=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Checkpoints in all forms, each in a directory of its name."""
    directory = tmp_path_factory.mktemp("verl")
    for ranks in set(FORMS.values()):
        on_ranks(ranks, save_all, directory, [form for form, number in FORMS.items() if number == ranks])
    return directory


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    """A checkpoint of FSDP2 to damage."""
    return shutil.copytree(saved / "fsdp2" / STEP, tmp_path / STEP) / "actor"


def truth(directory: Path) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return the model's tensors and each parameter's optimizer state, as torch gathers them."""
    model, optimizer = torch.load(directory / TRUTH)
    return model, optimizer["state"]


@pytest.mark.parametrize("tied", ["", " tied"], ids=["own head", "tied head"])
@pytest.mark.parametrize("form", FORMS)
def test_tensors_and_moments_are_those_that_torch_gathers(saved, form, tied):
    directory = saved / (form + tied) / STEP / "actor"
    tensors = open_tensors(directory)
    model, moments = truth(directory)
    assert tensors.meta.keys() == model.keys()
    for name, value in model.items():
        assert torch.equal(tensors.read(name), value), name
        assert (tensors.meta[name].shape, tensors.meta[name].dtype) == (value.shape, value.dtype)
    loaded = read_state(directory)
    assert loaded["extra"] == {"updates": UPDATES}
    assert loaded["optimizer"]["state"].keys() == moments.keys() == loaded["model"].keys()
    for name, moment in moments.items():
        assert torch.equal(loaded["model"][name], model[name]), name
        assert loaded["optimizer"]["state"][name].keys() == moment.keys()
        assert all(torch.equal(loaded["optimizer"]["state"][name][kind], moment[kind]) for kind in moment), name


def read_state(directory: Path) -> dict:
    """Return the full state that torch.distributed.checkpoint reads."""
    reader: Any = VerlReader(directory)
    state: dict = {"extra": {"updates": None}, "model": {}, "optimizer": {"state": {}}}
    for key, item in reader.read_metadata().state_dict_metadata.items():
        part, _, name = key.partition(".")
        if part == "model":
            state[part][name] = torch.empty(item.size, dtype=item.properties.dtype)
        elif part == "optimizer":
            name, _, kind = name.removeprefix("state.").rpartition(".")
            held = state[part]["state"].setdefault(name, {})
            held[kind] = torch.empty(item.size, dtype=item.properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a single process
        dcp.load(state, storage_reader=reader)
    return state


def test_full_tensors_are_read_from_the_first_rank_and_are_copies(tmp_path):
    for rank, value in enumerate([torch.arange(6.0).view(2, 3), torch.zeros(2, 3)]):
        torch.save({"weight": nn.Parameter(value)}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    tensors = open_tensors(tmp_path)
    tensors.read("weight").zero_()
    assert torch.equal(tensors.read("weight"), torch.arange(6.0).view(2, 3))


def test_a_model_that_verl_saved_only_as_a_hugging_face_directory_is_read(copy):
    for file in copy.glob("model_*.pt"):
        file.unlink()
    save_file({"weight": torch.ones(2)}, copy / "huggingface" / "model.safetensors")
    assert open_tensors(copy).meta.keys() == {"weight"}


def test_older_names_of_torchs_classes_are_supported(copy):
    """Before torch 2.5 DTensor was in another module, and meshes had other attributes."""
    older = {
        b"torch.distributed.tensor\nDTensor\n": b"torch.distributed._tensor.api\nDTensor\n",
        b"torch.distributed.tensor.placement_types\nShard\n": b"torch.distributed._tensor.placement_types\nShard\n",
        b"torch.distributed._mesh_layout\n_MeshLayout\n": b"torch.distributed.gone\nLayout\n",
    }
    for file in copy.glob("model_*.pt"):
        change_pickle(file, older)
    model, _ = truth(copy)
    tensors = open_tensors(copy)
    assert all(torch.equal(tensors.read(name), value) for name, value in model.items())


def change_pickle(file: Path, changes: dict[bytes, bytes]) -> None:
    """Replace bytes of what torch.save pickled; assert that each is present."""
    with ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in parts if name.endswith("/data.pkl"))
    for old, new in changes.items():
        assert old in parts[pickled]
        parts[pickled] = parts[pickled].replace(old, new)
    with ZipFile(file, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)


class Program:
    """Its pickle is a call of a function."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.file,)


def test_functions_that_a_file_names_are_not_called(tmp_path):
    trace = tmp_path / "trace"
    torch.save({"weight": torch.ones(2), "more": Program(trace)}, tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(ConfigError, match="more is neither a tensor nor a DTensor or ShardedTensor, but touch"):
        open_tensors(tmp_path)
    assert not trace.exists()


def test_a_file_without_a_dictionary_is_rejected(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(Unreadable, match=r"rank_0\.pt cannot be read: 'Linear' object has no attribute 'items'"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_missing_rank_is_named(copy, rank):
    (copy / f"model_world_size_3_rank_{rank}.pt").unlink()
    with pytest.raises(Unreadable, match=rf"model_world_size_3_rank_{rank}\.pt of 3 ranks is missing"):
        open_tensors(copy)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: os.truncate(file, file.stat().st_size - 100), "File is not a zip file"),
        (lambda file: flip(file, b"_local_tensor"), r"Bad CRC-32 for file '.*data\.pkl'"),
    ],
    ids=["a truncated file", "a flipped byte of the pickle"],
)
def test_a_damaged_file_is_named(copy, damage, said):
    damage(copy / "model_world_size_3_rank_1.pt")
    with pytest.raises(Unreadable, match=rf"rank_1\.pt cannot be read: {said}"):
        open_tensors(copy)


def test_a_flipped_byte_of_a_tensor_is_detected_by_its_checksum(copy):
    assert open_tensors(copy).faults() == []
    value = open_tensors(copy).read("model.norm.weight")[4:5]  # the first element of the second rank's shard
    flip(copy / "model_world_size_3_rank_1.pt", value.numpy().tobytes())
    assert open_tensors(copy).faults() == ["model_world_size_3_rank_1.pt: changed since it was written"]


def flip(file: Path, where: bytes) -> None:
    """Flip a bit of the first occurrence of these bytes."""
    content = bytearray(file.read_bytes())
    content[content.index(where)] ^= 1
    file.write_bytes(content)


def test_ranks_that_do_not_form_a_tensor_are_rejected(copy):
    shutil.copy(copy / "model_world_size_3_rank_2.pt", copy / "model_world_size_3_rank_0.pt")
    with pytest.raises(Unreadable, match=r"embed_tokens.weight cannot be read: 160 of its 170 elements were saved"):
        open_tensors(copy).read("model.embed_tokens.weight")
    shutil.copy(copy / "model_world_size_3_rank_1.pt", copy / "model_world_size_3_rank_2.pt")
    shutil.copy(copy / "model_world_size_3_rank_1.pt", copy / "model_world_size_3_rank_0.pt")
    with pytest.raises(Unreadable, match=r"embed_tokens.weight cannot be read: chunk \[6, 10\] at \[12, 0\]"):
        open_tensors(copy).read("model.embed_tokens.weight")


def test_the_number_of_ranks_is_read_from_file_names_without_settings(copy):
    (copy / "fsdp_config.json").unlink()
    assert len(open_tensors(copy).meta) > 0
    (copy / "model_world_size_5_rank_4.pt").touch()
    with pytest.raises(ConfigError, match=r"files of several runs, of \[3, 5\] ranks"):
        open_tensors(copy)


def test_the_model_is_read_without_an_optimizer(copy):
    for file in [*copy.glob("optim_*"), *copy.glob("extra_state_*")]:
        file.unlink()
    names = VerlReader(copy).read_metadata().state_dict_metadata.keys()
    assert names and all(name.startswith("model.") for name in names)


def test_a_damaged_optimizer_is_rejected_unless_it_is_not_read(copy):
    os.truncate(copy / "optim_world_size_3_rank_2.pt", 100)
    with pytest.raises(ConfigError, match=r"rank_2\.pt cannot be read: .*; trainer\.reset_optimizer=true resumes"):
        VerlReader(copy)
    assert VerlReader(copy, moments=False).read_metadata().state_dict_metadata


def test_an_optimizer_of_other_parameters_is_rejected(copy):
    for file in copy.glob("optim_*"):
        state = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(30)}
        torch.save({"state": {0: state}, "param_groups": [{"params": [0]}]}, file)
    with pytest.raises(ConfigError, match="does not fit the model's parameters"):
        VerlReader(copy)


def test_a_lora_adapter_is_rejected_by_name(tmp_path):
    torch.save({"base.lora_A.weight": torch.ones(2)}, tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(ConfigError, match=r"holds a LoRA adapter \(base\.lora_A\.weight\)"):
        VerlReader(tmp_path)


def test_a_rank_without_elements_of_a_parameter_has_no_state(tmp_path):
    weight = torch.arange(6.0).view(2, 3)
    for rank, states in enumerate([{0: {"step": 4, "exp_avg": weight.flatten().bfloat16()}}, {}]):
        torch.save({"weight": weight}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
        optimizer = {"state": states, "param_groups": [{"params": [0]}]}
        torch.save(optimizer, tmp_path / f"optim_world_size_2_rank_{rank}.pt")
    loaded = read_state(tmp_path)
    assert torch.equal(loaded["optimizer"]["state"]["weight"]["exp_avg"], weight.bfloat16())
    assert loaded["optimizer"]["state"]["weight"]["exp_avg"].dtype == torch.bfloat16
    assert loaded["extra"]["updates"] == loaded["optimizer"]["state"]["weight"]["step"] == 4


def test_parameters_may_have_had_different_numbers_of_updates(tmp_path):
    """For example, if one takes part in the computation only from some update on."""
    torch.save({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "model_world_size_1_rank_0.pt")
    states = {number: {"step": torch.tensor(step), "exp_avg": torch.zeros(2)} for number, step in ((0, 5.0), (1, 3.0))}
    optimizer = {"state": states, "param_groups": [{"params": [0, 1]}]}
    torch.save(optimizer, tmp_path / "optim_world_size_1_rank_0.pt")
    loaded = read_state(tmp_path)
    steps = {name: parameter["step"].item() for name, parameter in loaded["optimizer"]["state"].items()}
    assert steps == {"a": 5, "b": 3}
    assert loaded["extra"]["updates"] == 5


def test_tensor_parallel_shards_are_rejected(saved, tmp_path):
    copied = shutil.copytree(saved / "fsdp2 replicated" / STEP, tmp_path / STEP) / "actor"
    for file in copied.glob("model_*.pt"):
        change_pickle(file, {b"placement_types\nReplicate\n": b"placement_types\nShard\n"})
    with pytest.raises(Unreadable, match=r"it is placed as Shard and Shard \(tensor parallel\)"):
        open_tensors(copied).read("model.norm.weight")


LOADER = {"_sampler_iter_yielded": 5, "_sampler_iter_state": {"samples_yielded": 40, "sampler_iter_state": None}}
WITH_WORKERS = {
    "_snapshot": {"_snapshot_step": 2, "_main_snapshot": LOADER | {"_num_workers": 8}, "_worker_snapshots": {}},
    "_steps_since_snapshot": 1,
    "_iterator_finished": False,
}


@pytest.mark.parametrize(
    ("state", "batches"),
    [(LOADER | {"_num_yielded": 5}, 5), (WITH_WORKERS, 3)],
    ids=["no workers", "workers that are ahead"],
)
def test_used_prompts_are_read_from_the_data_loaders_state(copy, state, batches):
    torch.save(state, copy.parent / "data.pt")
    assert data_position(copy.parent) == DataPosition(prompts=batches * 8, batch_size=8)


def test_a_data_position_of_another_kind_is_rejected(copy):
    torch.save({"position": 3}, copy.parent / "data.pt")
    with pytest.raises(ConfigError, match=r"data\.pt cannot be read: '_num_yielded'"):
        data_position(copy.parent)


@pytest.mark.parametrize("kind", ["model", "optim", "extra_state"])
def test_damage_to_any_file_of_a_checkpoint_is_named(copy, kind):
    step, file = copy.parent, copy / f"{kind}_world_size_3_rank_1.pt"
    torch.save(LOADER, step / "data.pt")
    assert verl_faults(step) == []
    content = file.read_bytes()
    os.truncate(file, len(content) - 100)
    assert verl_faults(step) == [f"{file} cannot be read: File is not a zip file"]
    file.unlink()
    assert verl_faults(step) == [f"{copy}: {file.name} of 3 ranks is missing; copy it there"]
    file.write_bytes(content)
    with ZipFile(file) as archive:
        flip(file, archive.read(next(name for name in archive.namelist() if name.endswith("/data/0"))))
    assert verl_faults(step) == [f"actor/{file.name}: changed since it was written"]


def test_a_damaged_data_position_is_named(copy):
    step = copy.parent
    torch.save(LOADER, step / "data.pt")
    flip(step / "data.pt", b"_sampler_iter_yielded")
    assert verl_faults(step) == ["data.pt: changed since it was written"]
    os.truncate(step / "data.pt", 50)
    assert verl_faults(step) == [f"{step / 'data.pt'} cannot be read: File is not a zip file"]
