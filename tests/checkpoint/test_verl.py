import os
import shutil
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hybridrl.checkpoint.read import open_tensors
from hybridrl.checkpoint.tensors import Unreadable
from hybridrl.checkpoint.verl import DataPosition, read_verl
from hybridrl.config import ConfigError
from tests.checkpoint.verl_files import SCHEDULE_STEPS, TRUTH, UPDATES, save_as_verl
from tests.training.on_ranks import on_ranks

FORMS = {
    "fsdp2": 3,
    "fsdp2 columns": 2,
    "fsdp2 replicated": 4,
    "fsdp1": 3,
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
    """All forms, each in a directory of its name."""
    directory = tmp_path_factory.mktemp("verl")
    for ranks in set(FORMS.values()):
        on_ranks(ranks, save_all, directory, [form for form, number in FORMS.items() if number == ranks])
    return directory


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    """A checkpoint of FSDP2 to be spoilt."""
    return shutil.copytree(saved / "fsdp2" / STEP, tmp_path / STEP) / "actor"


def truth(directory: Path) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The model's tensors, and each parameter's optimizer state, as torch gathers them."""
    model, optimizer = torch.load(directory / TRUTH)
    return model, optimizer["state"]


@pytest.mark.parametrize("tied", ["", " tied"], ids=["own head", "tied head"])
@pytest.mark.parametrize("form", FORMS)
def test_tensors_and_moments_are_those_that_torch_gathers(saved, form, tied):
    directory = saved / (form + tied) / STEP / "actor"
    found = read_verl(directory)
    model, states = truth(directory)
    assert found.model.meta.keys() == model.keys()
    for name, value in model.items():
        assert torch.equal(found.model.read(name), value), name
        assert (found.model.meta[name].shape, found.model.meta[name].dtype) == (value.shape, value.dtype)
    for kind in ("exp_avg", "exp_avg_sq"):
        assert found.moments[kind].meta.keys() == states.keys()
        for name, state in states.items():
            assert torch.equal(found.moments[kind].read(name), state[kind]), name
    assert (found.updates, found.schedule_steps, found.step) == (UPDATES, SCHEDULE_STEPS, 7)


def test_whole_tensors_are_taken_from_the_first_rank(tmp_path):
    for rank, value in enumerate([torch.arange(6.0).view(2, 3), torch.zeros(2, 3)]):
        torch.save({"weight": nn.Parameter(value)}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    assert torch.equal(open_tensors(tmp_path).read("weight"), torch.arange(6.0).view(2, 3))


def test_what_is_read_is_ones_own(tmp_path):
    torch.save({"weight": torch.ones(2)}, tmp_path / "model_world_size_1_rank_0.pt")
    tensors = open_tensors(tmp_path)
    tensors.read("weight").zero_()
    assert torch.equal(tensors.read("weight"), torch.ones(2))


def test_a_model_that_verl_saved_as_a_hugging_face_directory_only_is_read(copy):
    for file in copy.glob("model_*.pt"):
        file.unlink()
    save_file({"weight": torch.ones(2)}, copy / "huggingface" / "model.safetensors")
    assert open_tensors(copy).meta.keys() == {"weight"}


def test_older_names_of_torchs_classes_are_understood(copy):
    """torch before 2.5 had DTensor elsewhere, and its meshes had other attributes."""
    older = {
        b"torch.distributed.tensor\nDTensor\n": b"torch.distributed._tensor.api\nDTensor\n",
        b"torch.distributed.tensor.placement_types\nShard\n": b"torch.distributed._tensor.placement_types\nShard\n",
        b"torch.distributed._mesh_layout\n_MeshLayout\n": b"torch.distributed.gone\nLayout\n",
    }
    for file in copy.glob("model_*.pt"):
        change_pickle(file, older)
    model, _ = truth(copy)
    found = open_tensors(copy)
    assert all(torch.equal(found.read(name), value) for name, value in model.items())


def change_pickle(file: Path, changes: dict[bytes, bytes]) -> None:
    """Replace parts of what torch.save pickled; each has to be there."""
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
    """Pickled, it is a call of a function."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.file,)


def test_nothing_that_a_file_names_is_called(tmp_path):
    trace = tmp_path / "trace"
    torch.save({"weight": torch.ones(2), "more": Program(trace)}, tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(ConfigError, match="more is neither a tensor nor a DTensor or ShardedTensor, but touch"):
        open_tensors(tmp_path)
    assert not trace.exists()


def test_what_torch_did_not_save_as_a_dictionary_is_refused(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(Unreadable, match=r"rank_0\.pt cannot be read: 'Linear' object has no attribute 'items'"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_is_missing_is_named(copy, rank):
    (copy / f"model_world_size_3_rank_{rank}.pt").unlink()
    with pytest.raises(Unreadable, match=rf"model_world_size_3_rank_{rank}\.pt of 3 ranks is missing"):
        open_tensors(copy)


def test_a_truncated_file_is_named(copy):
    file = copy / "model_world_size_3_rank_1.pt"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(Unreadable, match=r"rank_1\.pt cannot be read: File is not a zip file"):
        open_tensors(copy)


def test_a_flipped_byte_of_the_pickle_is_named(copy):
    flip(copy / "model_world_size_3_rank_1.pt", b"_local_tensor")
    with pytest.raises(Unreadable, match=r"rank_1\.pt cannot be read: Bad CRC-32 for file '.*data\.pkl'"):
        open_tensors(copy)


def test_a_flipped_byte_of_a_tensor_is_found_by_its_checksum(copy):
    assert open_tensors(copy).faults() == []
    value = open_tensors(copy).read("model.norm.weight")[4:5]  # the first element of the second rank's shard
    flip(copy / "model_world_size_3_rank_1.pt", value.numpy().tobytes())
    assert open_tensors(copy).faults() == ["model_world_size_3_rank_1.pt: changed since it was written"]


def flip(file: Path, where: bytes) -> None:
    """Change a bit of the first place with these bytes."""
    content = bytearray(file.read_bytes())
    content[content.index(where)] ^= 1
    file.write_bytes(content)


def test_ranks_that_do_not_make_up_a_tensor_are_refused(copy):
    shutil.copy(copy / "model_world_size_3_rank_2.pt", copy / "model_world_size_3_rank_0.pt")
    with pytest.raises(Unreadable, match=r"embed_tokens.weight cannot be read: of its 170 elements 160 were saved"):
        open_tensors(copy).read("model.embed_tokens.weight")
    shutil.copy(copy / "model_world_size_3_rank_1.pt", copy / "model_world_size_3_rank_2.pt")
    shutil.copy(copy / "model_world_size_3_rank_1.pt", copy / "model_world_size_3_rank_0.pt")
    with pytest.raises(Unreadable, match=r"embed_tokens.weight cannot be read: part \[6, 10\] at \[12, 0\]"):
        open_tensors(copy).read("model.embed_tokens.weight")


def test_the_number_of_ranks_is_told_by_the_files_where_it_is_not_written_down(copy):
    (copy / "fsdp_config.json").unlink()
    assert len(open_tensors(copy).meta) > 0
    (copy / "model_world_size_5_rank_4.pt").touch()
    with pytest.raises(ConfigError, match=r"files of several runs, of \[3, 5\] ranks"):
        open_tensors(copy)


def test_what_was_not_saved_is_noted_and_the_model_is_read(copy):
    for file in [*copy.glob("optim_*"), *copy.glob("extra_state_*")]:
        file.unlink()
    found = read_verl(copy)
    assert (found.moments, found.updates, found.schedule_steps, found.data) == ({}, None, None, None)
    assert ["optim_" in note or "extra_state_" in note or "data.pt" in note for note in found.notes] == [True] * 3
    assert torch.equal(found.model.read("model.norm.weight"), truth(copy)[0]["model.norm.weight"])


def test_an_optimizer_of_other_parameters_is_noted(copy):
    for file in copy.glob("optim_*"):
        state = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(30)}
        torch.save({"state": {0: state}, "param_groups": [{"params": [0]}]}, file)
    found = read_verl(copy)
    assert found.moments == {}
    assert "does not fit the model's parameters" in found.notes[0]


def test_a_rank_without_elements_of_a_parameter_has_no_state_and_changes_no_type(tmp_path):
    weight = torch.arange(6.0).view(2, 3)
    for rank, states in enumerate([{0: {"step": 4, "exp_avg": weight.flatten().bfloat16()}}, {}]):
        torch.save({"weight": weight}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
        optimizer = {"state": states, "param_groups": [{"params": [0]}]}
        torch.save(optimizer, tmp_path / f"optim_world_size_2_rank_{rank}.pt")
    found = read_verl(tmp_path)
    moment = found.moments["exp_avg"].read("weight")
    assert torch.equal(moment, weight.bfloat16()) and moment.dtype == torch.bfloat16
    assert found.updates == 4


def test_tensor_parallel_shards_are_refused(saved, tmp_path):
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
def test_prompts_drawn_are_told_by_the_data_loaders_state(copy, state, batches):
    torch.save(state, copy.parent / "data.pt")
    assert read_verl(copy).data == DataPosition(prompts=batches * 8, batch_size=8)


def test_a_data_position_of_another_kind_is_noted(copy):
    torch.save({"position": 3}, copy.parent / "data.pt")
    found = read_verl(copy)
    assert found.data is None
    assert "data.pt cannot be read: '_num_yielded'" in found.notes[-1]


def test_the_step_is_that_of_the_directory_if_its_name_says_one(copy, tmp_path):
    assert read_verl(copy).step == 7
    assert read_verl(copy.rename(tmp_path / "elsewhere")).step is None
