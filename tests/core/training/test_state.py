import gc
import os
import shutil
import time
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from transformers import GenerationConfig

from hybridrl.checkpoint.export import export_settings
from hybridrl.config import ConfigError
from hybridrl.config.files import HUGGINGFACE
from hybridrl.config.schema import FSDPConfig, OptimizerConfig, WrapPolicyConfig
from hybridrl.core import device as devices
from hybridrl.core.algorithms.objective import Divisors
from hybridrl.core.batch import Batch
from hybridrl.core.training.fsdp import (
    full_tensor,
    host_copies,
    host_parameters,
    local,
    move_parameters,
    shard,
    shard_and_fill,
)
from hybridrl.core.training.layout import layout
from hybridrl.core.training.learner import Learner
from hybridrl.core.training.model import ValueModel, blank_language_model
from hybridrl.core.training.optimizer import Optimizers
from hybridrl.core.training.packing import MicroBatch
from hybridrl.core.training.planning import MiniBatch
from hybridrl.core.training.state import StateWriter, load_state, state_of
from hybridrl.required import required
from tests.core.training.families import VOCABULARY, load_language_model, load_value_model, model_config
from tests.core.training.on_ranks import on_ranks
from tests.sections import section_of

ALL = ("model", "optimizer", "extra")
OPTIMIZERS = ("AdamW", "Muon")
UPDATES = 4  # of an uninterrupted run; the checkpoint is written after half of them
CPU = torch.device("cpu")


class Run(NamedTuple):
    """The full state of a run at some time, and the learning rates of the updates that followed."""

    then: dict[str, Tensor]
    at_last: dict[str, Tensor]
    rates: list[float]


def fsdp_config(**changes: object) -> FSDPConfig:
    values = {"optimizer_offload": True, "dtype": "float32", "wrap_policy": WrapPolicyConfig([])}
    return section_of(FSDPConfig, "actor_rollout_ref.actor.fsdp_config", **values | changes)


def optimizer_config(**changes: object) -> OptimizerConfig:
    """With a learning rate that differs in every update."""
    values = {"lr": 0.01, "betas": [0.9, 0.99], "lr_scheduler_type": "cosine", "lr_warmup_steps": 0}
    return section_of(OptimizerConfig, "actor_rollout_ref.actor.optim", **values | changes)


def build(path: str, *, critic: bool = False, shards: int | None = None, **optimizer: object) -> Learner:
    ranks, config = dist.get_world_size(), fsdp_config()
    loaded = (load_value_model if critic else load_language_model)(model_config(path), torch.float32)
    model = shard(loaded, config, layout("cpu", ranks, shards or ranks))
    built = Optimizers(model, optimizer_config(**optimizer), 9)
    return Learner(model, config, CPU, padded=False, optimizers=built, dump_prefix=Path("unused"))


def rows(update: int) -> Batch:
    """Two rows, different for every rank and update."""
    generator = torch.Generator().manual_seed(10 * update + dist.get_rank())
    numbers = torch.arange(2)
    return Batch(
        prompt_lengths=torch.tensor([2, 3]),
        response_lengths=torch.tensor([4, 6]),
        prompt_ids=torch.randint(VOCABULARY, (5,), generator=generator),
        response_ids=torch.randint(VOCABULARY, (10,), generator=generator),
        group=numbers,
        position=numbers,
        sample=numbers,
        response_mask=torch.ones(10, dtype=torch.bool),
    )


def train(learner: Learner, updates: range) -> list[float]:
    """Run updates of these numbers. Returns their learning rates."""

    def loss(part: MicroBatch, totals: Divisors | None) -> tuple[Tensor, dict[str, Tensor]]:
        inputs = part.inputs
        critic = isinstance(learner.model, ValueModel)
        actual = (learner.model(inputs) - 1).square() if critic else -learner.model(inputs, 1.0).log_probs
        return actual.sum() / (required(totals).tokens * dist.get_world_size()), {}

    rates = []
    for number in updates:
        batch = rows(number)
        (shares,) = learner.update(batch, [MiniBatch([[0], [1]], Divisors.of(batch))], loss, 1.0, step=number)
        assert not shares["skipped_updates"]
        rates.append(shares["lr"] * dist.get_world_size())
    return rates


def full(learner: Learner) -> dict[str, Tensor]:
    """Every tensor of the state, gathered from the ranks."""

    def walk(value: object, path: str) -> dict[str, Tensor]:
        if isinstance(value, dict):
            return {name: tensor for key, item in value.items() for name, tensor in walk(item, f"{path}.{key}").items()}
        assert isinstance(value, Tensor)
        return {path: full_tensor(value).clone()}

    return walk(state_of(learner.model, learner.optimizers, ("model", "optimizer")), "")


def wait_for(writer: StateWriter) -> None:
    while not writer.finished():
        time.sleep(0.001)


# -- on the ranks ------------------------------------------------------------------------------------------------------


def unbroken(path: str, directory: Path, contents: Collection[str] = ALL, **options: object) -> Run:
    """A run that is saved halfway, and written only after it has ended."""
    learner, writer, ended = build(path, **options), StateWriter("cpu"), Event()
    train(learner, range(UPDATES // 2))
    then = full(learner)
    writer.thread.submit(ended.wait)
    writer.start({directory: state_of(learner.model, learner.optimizers, contents)})
    rates = train(learner, range(UPDATES // 2, UPDATES))
    assert not writer.finished()
    ended.set()
    wait_for(writer)
    return Run(then, full(learner), rates)


def resumed(path: str, directory: Path, contents: Collection[str] = ALL, **options: object) -> Run:
    """A run that resumes from the checkpoint."""
    learner = build(path, **options)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.fill_(7.0)
    load_state(learner.model, learner.optimizers, contents, directory, dist.new_group(backend="gloo"))
    then = full(learner)
    return Run(then, rates=train(learner, range(UPDATES // 2, UPDATES)), at_last=full(learner))


def of_each_optimizer(run: Callable[..., Run], path: str, directory: Path) -> dict[str, Run]:
    return {name: run(path, directory / name, optimizer=name) for name in OPTIMIZERS}


def moved(path: str) -> list[dict[str, Tensor]]:
    """The state after some updates, of a model on the device and of one that is offloaded after each."""
    stays, moves = build(path), build(path)
    places = host_parameters(moves.model)
    assert len({local(place).untyped_storage().data_ptr() for place in places.values()}) == 1
    for number in range(3):
        for learner in (stays, moves):
            train(learner, range(number, number + 1))
        move_parameters(moves.model, places)
        addresses = {name: local(value).data_ptr() for name, value in moves.model.named_parameters()}
        assert addresses == {name: local(places[value]).data_ptr() for name, value in moves.model.named_parameters()}
        moves.model._apply(lambda value: value.clone())  # another address, as on a device
    return [full(stays), full(moves)]


def under_offload_policy(path: str) -> list[list[dict[str, Tensor]]]:
    return [with_and_without_policy(path, optimizer) for optimizer in OPTIMIZERS]


def with_and_without_policy(path: str, optimizer: str) -> list[dict[str, Tensor]]:
    """The state after some updates, with FSDP2's offload policy and without it; the parameters are read from disk."""
    states = []
    for offloaded in (True, False):
        config, grid = (
            fsdp_config(offload_policy=offloaded),
            layout("cpu", dist.get_world_size(), dist.get_world_size()),
        )
        blank = blank_language_model(model_config(path), torch.float32)
        model = shard_and_fill(blank, path, config, grid, CPU, offloaded=offloaded)
        allocations = {local(value).untyped_storage().data_ptr() for value in model.parameters()}
        assert (len(allocations) == 1) == offloaded
        groups = [
            group for module in model.modules() if isinstance(module, FSDPModule) for group in param_groups(module)
        ]
        assert {isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups} == {offloaded}
        optimizers = Optimizers(model, optimizer_config(optimizer=optimizer), 9)
        learner = Learner(model, config, CPU, padded=False, optimizers=optimizers, dump_prefix=Path())
        train(learner, range(3))
        states.append(full(learner))
    return states


def param_groups(module: FSDPModule) -> list[Any]:
    """Torch 2.11 has one."""
    state = module._get_fsdp_state()
    return state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]


def told_of_failures(path: str, directory: Path) -> list[str]:
    """This rank's errors if rank 1 cannot write and if it cannot copy, and the result of a save that succeeds."""
    learner, writer, messages = build(path), StateWriter("cpu"), []
    blocked, good = directory / "blocked", directory / "good"
    (blocked / "__1_0.distcp").mkdir(parents=True, exist_ok=True)
    state = state_of(learner.model, learner.optimizers, ALL)
    writer.start({blocked: state})
    if dist.get_rank() == 0:  # only rank 0 is asked
        with pytest.raises(RuntimeError) as caught:
            wait_for(writer)
        messages.append(str(caught.value))
    with pytest.raises(RuntimeError) as caught:
        writer.start({good: {"model": {"none": torch.empty(1, device="meta")}} if dist.get_rank() == 1 else state})
    messages.append(str(caught.value))
    writer.start({good: state})
    wait_for(writer)
    load_state(learner.model, learner.optimizers, ALL, good, writer.group)
    return messages


# ----------------------------------------------------------------------------------------------------------------------


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert not [name for name in actual if not torch.equal(actual[name], expected[name])]


@pytest.fixture(scope="module", params=[1, 2])
def runs(request, directories, tmp_path_factory):
    """An uninterrupted run on this many ranks by each optimizer, and a resumed one in other processes."""
    paths = directories["two heads a key"], tmp_path_factory.mktemp("states")
    return [on_ranks(request.param, of_each_optimizer, run, *paths)[0] for run in (unbroken, resumed)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(runs, optimizer):
    saved, actual = (run[optimizer] for run in runs)
    assert any(name.endswith("exp_avg") and tensor.any() for name, tensor in saved.then.items())
    assert_equal(actual.then, saved.then)
    assert_equal(actual.at_last, saved.at_last)
    assert actual.rates == saved.rates and len(set(actual.rates)) == 2
    changed = [name for name in saved.then if not torch.equal(saved.then[name], saved.at_last[name])]
    assert len(changed) == len(saved.then), "all that was saved changed while it was being written"


def test_a_state_saved_on_two_ranks_is_read_on_one_and_on_three(directory, tmp_path):
    # A critic's head has one row, so there are ranks without any of it.
    saved, _ = on_ranks(2, unbroken, directory, tmp_path, critic=True, optimizer="Muon")
    for ranks in (1, 3):
        actual = on_ranks(ranks, resumed, directory, tmp_path, critic=True, optimizer="Muon")
        assert_equal(actual[-1].then, saved.then)


def test_offloaded_parameters_train_as_those_on_the_device(directories):
    for stays, moves in on_ranks(2, moved, directories["all heads one key, tied head"]):
        assert_equal(moves, stays)


def test_a_model_trains_the_same_under_offload_policy(directories):
    for by_optimizer in on_ranks(2, under_offload_policy, directories["all heads one key, tied head"]):
        for offloaded, kept in by_optimizer:
            assert_equal(offloaded, kept)


def test_a_state_saved_by_replicas_is_read_as_shards(directory, tmp_path):
    saved, _ = on_ranks(2, unbroken, directory, tmp_path, shards=1)
    assert len(list(tmp_path.glob("*.distcp"))) == 2
    (actual,) = on_ranks(1, resumed, directory, tmp_path)
    assert_equal(actual.then, saved.then)


# -- on one rank, in this process --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group(backend="gloo")
    dist.destroy_process_group()


def save(learner: Learner, directory: Path, contents: Collection[str] = ALL) -> None:
    writer = StateWriter("cpu")
    writer.start({directory: state_of(learner.model, learner.optimizers, contents)})
    wait_for(writer)


def load(learner: Learner, directory: Path, group: dist.ProcessGroup, contents: Collection[str] = ALL) -> None:
    load_state(learner.model, learner.optimizers, contents, directory, group)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_moments_have_the_names_that_torch_gives_them(group, directory, optimizer):
    learner = build(directory, optimizer=optimizer)
    train(learner, range(1))
    actual = state_of(learner.model, learner.optimizers, ALL)["optimizer"]["state"]
    expected: Any = get_optimizer_state_dict(learner.model.model, learner.optimizers.optimizers)["state"]
    assert actual.keys() == expected.keys()
    for name, moments in expected.items():
        assert_equal(*({kind: full_tensor(value) for kind, value in of.items()} for of in (moments, actual[name])))


def test_page_locked_copies_reuse_their_memory_even_if_moments_are_moved(group, directory, tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "synchronize", lambda device: None)
    monkeypatch.setattr(devices, "host_buffer", lambda size, device: torch.empty(size, dtype=torch.uint8))
    learner, writer = build(directory), StateWriter("cuda")
    places = []
    for number in range(3):
        train(learner, range(number, number + 1))
        for state in learner.optimizers.optimizers[0].state.values():
            state["exp_avg"] = state["exp_avg"].clone()
        copied = writer.start({tmp_path / str(number) / "actor": state_of(learner.model, learner.optimizers, ALL)})
        places.append({path: local(copy).data_ptr() for path, copy in writer.copies["actor"].items() if copy.dim()})
        wait_for(writer)
    assert places[0] == places[1] == places[2]
    parameters = list(learner.model.parameters())
    # Parameter and two moments in float32, and the number of steps of each.
    assert copied == sum(12 * parameter.numel() + 4 for parameter in parameters)
    load(actual := build(directory), tmp_path / "2" / "actor", group)
    assert_equal(full(actual), full(learner))


def test_on_cpu_copies_are_freed_once_they_are_written_and_are_not_copied_again_to_write_them(
    group, directory, tmp_path, monkeypatch
):
    learner, writer, ended, made = build(directory), StateWriter("cpu"), Event(), []

    def recorded(tensors: Any, device: str) -> list[Tensor]:
        copies = host_copies(tensors, device)
        made.extend(weakref.ref(local(copy).untyped_storage()) for copy in copies)
        # torch copies a tensor that shares its memory with others, to write it without theirs
        assert all(local(copy).untyped_storage().nbytes() < local(copy).nbytes + 64 for copy in copies)
        return copies

    monkeypatch.setattr("hybridrl.core.training.state.host_copies", recorded)
    writer.thread.submit(ended.wait)
    writer.start({tmp_path / name: state_of(learner.model, learner.optimizers, ALL) for name in ("actor", "critic")})
    gc.collect()
    assert made and all(copy() is not None for copy in made)
    ended.set()
    writer.thread.submit(int).result()  # after what is written
    gc.collect()
    assert not any(copy() for copy in made)
    assert writer.finished()


def test_learning_rates_are_those_of_the_resumed_configuration(group, directory, tmp_path):
    learner = build(directory)
    train(learner, range(3))
    save(learner, tmp_path)
    actual = build(directory, lr=0.1, weight_decay=0.5)
    load(actual, tmp_path, group)
    assert actual.optimizers.lr == pytest.approx(10 * learner.optimizers.lr)
    assert actual.optimizers.optimizers[0].param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize(("part", "kept"), [(part, {*ALL} - {part}) for part in ALL] + [("model", None)])
def test_a_part_that_was_not_saved_is_named(group, directory, tmp_path, part, kept):
    learner = build(directory)
    if kept is not None:
        save(learner, tmp_path, sorted(kept))
    with pytest.raises(ValueError, match=rf"^{tmp_path}: no {part} was saved there, see checkpoint.save_contents$"):
        load(learner, tmp_path, group)


def test_moments_of_another_optimizer_are_rejected_with_a_fix(group, directory, tmp_path):
    save(build(directory, optimizer="Muon"), tmp_path)
    lacks = "the optimizer saved there has no state.model.layers.0.mlp.down_proj.weight.exp_avg"
    with pytest.raises(ValueError, match=f"{lacks}; trainer.reset_optimizer=true starts without moments and schedule"):
        load(build(directory), tmp_path, group)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("all heads their own keys", r"has model.*0.self_attn.k_proj.bias of the shape \[16\], this run's is \[32\]"),
        ("all heads one key, tied head", "has lm_head.weight, which is not in this run's"),
        ("qwen3", "has no model.layers.0.self_attn.k_norm.weight"),
    ],
)
def test_another_model_is_rejected(group, directories, tmp_path, family, message):
    save(build(directories["two heads a key"]), tmp_path)
    learner = build(directories[family])
    before = full(learner)
    with pytest.raises(ValueError, match=f"the model saved there {message}"):
        load(learner, tmp_path, group)
    assert_equal(full(learner), before)


def test_a_failed_write_is_reported_once_and_the_next_one_succeeds(group, directory, tmp_path):
    learner, writer = build(directory), StateWriter("cpu")
    (tmp_path / "full").touch()
    for folder in ("full", "empty"):
        writer.start({tmp_path / folder / "actor": state_of(learner.model, learner.optimizers, ALL)})
        writer.writing[0].exception()
        if folder == "full":
            with pytest.raises(RuntimeError, match=f"{tmp_path}/full/actor: rank 0: NotADirectoryError"):
                writer.finished()
        assert writer.finished()
    load(build(directory), tmp_path / "empty" / "actor", group)


def test_a_rank_that_cannot_write_or_copy_is_reported_and_later_saves_are_complete(directory, tmp_path):
    (not_written, not_copied), (own,) = on_ranks(2, told_of_failures, directory, tmp_path)
    assert not_written.startswith(f"{tmp_path}/blocked: rank 1: IsADirectoryError: ")
    assert not (tmp_path / "blocked" / ".metadata").exists()
    assert not_copied == "another rank could not copy its state to host memory"
    assert "meta tensor" in own


def test_a_truncated_file_is_an_error(group, directory, tmp_path):
    learner = build(directory)
    save(learner, tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(RuntimeError, match=f"^{tmp_path}: rank 0: "):
        load(learner, tmp_path, group)


# -- a model to start from ---------------------------------------------------------------------------------------------


@pytest.fixture
def saved(group, directories, tmp_path):
    """A trained model saved with its configuration, by family; and the model."""

    def make(family: str = "two heads a key", **options: bool) -> tuple[str, nn.Module]:
        learner = build(directories[family], **options)
        train(learner, range(1))
        save(learner, tmp_path)
        model: Any = learner.model.model
        if model.can_generate():
            model.generation_config = GenerationConfig(top_k=7, eos_token_id=[3, 5])
        export_settings(model, tmp_path / HUGGINGFACE, torch.float32)
        return str(tmp_path), model

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["two heads a key", "all heads one key, tied head"])
def test_training_can_start_from_a_saved_model(saved, family, dtype):
    path, model = saved(family)
    actual = load_language_model(model_config(path), dtype).model
    expected = {name: full_tensor(value.detach()).to(dtype) for name, value in model.named_parameters()}
    assert_equal(dict(actual.named_parameters()), expected)
    assert {value.dtype for value in actual.parameters()} == {dtype}
    assert (actual.lm_head.weight is actual.model.embed_tokens.weight) == ("tied" in family)
    assert (actual.generation_config.top_k, actual.generation_config.eos_token_id) == (7, [3, 5])


def test_training_can_start_from_a_saved_critic(saved):
    path, model = saved(critic=True)
    actual = load_value_model(model_config(path), torch.float32).model
    assert_equal(
        dict(actual.named_parameters()), {name: full_tensor(value) for name, value in model.named_parameters()}
    )


def test_a_critic_can_start_from_a_saved_actor(saved):
    path, model = saved()
    actual = load_value_model(model_config(path), torch.float32).model
    assert torch.equal(actual.model.norm.weight, full_tensor(model.model.norm.weight))
    assert not actual.score.weight.any()


def test_a_saved_critic_is_not_a_language_model(saved):
    path, _ = saved(critic=True)
    with pytest.raises(ValueError, match=r"1 of the model's weights are missing \(lm_head.weight\)"):
        load_language_model(model_config(path), torch.float32)


def test_training_cannot_start_from_a_checkpoint_without_the_model(group, directory, tmp_path):
    learner = build(directory)
    save(learner, tmp_path, ["optimizer"])
    export_settings(learner.model.model, tmp_path / HUGGINGFACE, torch.float32)
    with pytest.raises(ConfigError, match=f"{tmp_path} holds no saved model"):
        load_language_model(model_config(str(tmp_path)), torch.float32)


def test_full_weights_next_to_the_shards_of_other_parts_are_read(group, directory, tmp_path):
    save(build(directory), tmp_path, ["optimizer"])
    shutil.copytree(directory, tmp_path / HUGGINGFACE)
    actual = load_language_model(model_config(str(tmp_path)), torch.float32)
    assert_equal(actual.state_dict(), load_language_model(model_config(directory), torch.float32).state_dict())


def test_training_can_start_from_verls_shards(group, directory, tmp_path):
    expected = load_language_model(model_config(directory), torch.float32)
    torch.save(expected.model.state_dict(), tmp_path / "model_world_size_1_rank_0.pt")
    (tmp_path / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 1}')
    expected.model.config.save_pretrained(tmp_path / HUGGINGFACE)
    actual = load_language_model(model_config(str(tmp_path)), torch.float32)
    assert_equal(actual.state_dict(), expected.state_dict())
