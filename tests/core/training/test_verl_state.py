"""A state that verl's FSDP workers saved on some ranks is read on others."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.core.training.state import load_state
from tests.compat.verl.files import TRUTH, UPDATES, save_as_verl
from tests.core.training.on_ranks import on_ranks
from tests.core.training.test_state import ALL, build, full

FORMS = {"fsdp1": (1, 2, 3), "fsdp2": (1, 2, 3)}


def save(directory: Path) -> None:
    for form in FORMS:
        save_as_verl(directory / f"{form} of {dist.get_world_size()}", form)
    save_as_verl(directory / f"critic of {dist.get_world_size()}", "fsdp2", value=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("verl")
    for ranks in (1, 2, 3):
        on_ranks(ranks, save, directory)
    return directory


def loaded(directories: list[Path]) -> list[dict[str, Tensor]]:
    """The state of a run resumed from each of them: parameters, moments, and the position in the schedule."""
    actual = []
    for directory in directories:
        learner = build(str(directory), critic=directory.name.startswith("critic"))
        with torch.no_grad():
            for parameter in learner.model.parameters():
                parameter.fill_(7.0)
        load_state(learner.model, learner.optimizers, ALL, directory, dist.new_group(backend="gloo"))
        actual.append(full(learner) | {"updates": torch.tensor(learner.optimizers.updates)})
    return actual


def truth(directory: Path) -> dict[str, Tensor]:
    """The same, gathered by torch from the ranks that saved it."""
    model, optimizer = torch.load(directory / TRUTH)
    states = optimizer["state"]
    moments = {f".optimizer.state.{name}.{kind}": states[name][kind] for name in states for kind in states[name]}
    return {f".model.{name}": value for name, value in model.items()} | moments | {"updates": torch.tensor(UPDATES)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_read_bit_for_bit_on_any_number_of_ranks(saved, ranks):
    directories = sorted(saved.iterdir())
    assert len(directories) == 9
    for per_rank in on_ranks(ranks, loaded, directories):
        for directory, actual in zip(directories, per_rank, strict=True):
            expected = truth(directory)
            assert actual.keys() == expected.keys(), directory.name
            assert not [name for name in actual if not torch.equal(actual[name], expected[name])], directory.name
            assert all(actual[name].any() for name in actual if name.endswith("exp_avg_sq"))
