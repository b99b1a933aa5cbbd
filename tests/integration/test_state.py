"""Training ranks that are saved while they continue to train, and others that resume; in a model with dropout."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

from hybridrl.core.algorithms.objective import Divisors
from hybridrl.core.cluster import Group, spawn
from hybridrl.core.cluster.group import kill
from hybridrl.core.training.planning import MicroBatchBudget, MiniBatch, Pieces, plan
from hybridrl.core.training.worker import TrainWorker
from hybridrl.required import required
from hybridrl.runs.ranks import build_models
from hybridrl.runs.settings import build_algorithm, ppo_worker_config
from tests.integration.test_gradient import LOSS, VALUE_LOSS, ragged_batch, three_models

LIMIT = 120
ALL = ["model", "optimizer", "extra"]
CONTENTS = {"actor": ALL, "critic": ALL, "reference": ["model"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A small random model with a dropout of 0.1."""
    torch.manual_seed(0)
    path = str(tmp_path_factory.mktemp("model"))
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def start(config, session, model, tmp_path_factory):
    """Return a function that starts training ranks with actor, critic and reference."""

    def ranks(count: int, path: str = model) -> Group:
        logs = tmp_path_factory.mktemp("logs")
        files = [str(logs / f"{rank}.log") for rank in range(count)]
        environment = {"OMP_NUM_THREADS": "1"}
        actors = [spawn(TrainWorker, session, r, environment, r, count, files[r]) for r in range(count)]
        group = Group(actors, "train worker", files)
        worker = ppo_worker_config(config, build_algorithm(config), logs, steps=8)
        actor = worker.models["actor"]
        learner = required(actor.trained)
        actor = replace(
            actor,
            model=replace(actor.model, path=path, override_config={"resid_pdrop": 0.1}),
            trained=replace(learner, optimizer=replace(learner.optimizer, lr_scheduler_type="linear")),
        )
        models = three_models(actor, count, path)
        critic = models["critic"]
        models["critic"] = replace(critic, fsdp=replace(critic.fsdp, dtype="bfloat16"))
        worker = replace(worker, models=models)
        build_models(group, worker, LIMIT)
        return group

    return ranks


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["one rank", "two ranks"])
def started(request, start, tmp_path_factory) -> tuple[Group, Group, Path]:
    """Two groups of this many ranks, and a checkpoint of one of them before its first step."""
    initial = tmp_path_factory.mktemp("initial")
    groups = start(request.param), start(request.param)
    write(groups[0], initial)
    yield *groups, initial
    for group in groups:
        for actor in group.actors:
            kill(actor)


@pytest.fixture
def two(started) -> tuple[Group, Group]:
    """Two identical groups of ranks before their first step."""
    one, other, initial = started
    for group in (one, other):
        load(group, initial)
    return one, other


def load(group: Group, directory: Path, contents: dict[str, list[str]] = CONTENTS) -> None:
    group.broadcast(TrainWorker.load, str(directory), contents, timeout=LIMIT)


def update(group: Group, step: int) -> list[dict[str, float]]:
    """Run a step of actor and critic. Returns each rank's metrics of the actor, then those of the critic."""
    batch = ragged_batch()
    shares = plan(Pieces.single(batch.lengths.tolist()), len(group), MicroBatchBudget(10_000))
    parts = [(batch, [MiniBatch(share, Divisors.of(batch))]) for share in shares]
    actor = group.scatter(TrainWorker.update_policy, [(*part, LOSS, step) for part in parts], timeout=LIMIT)
    critic = group.scatter(TrainWorker.update_critic, [(*part, VALUE_LOSS, step) for part in parts], timeout=LIMIT)
    return [metrics for (metrics,), _ in actor] + [metrics for (metrics,) in critic]


def write(group: Group, directory: Path, then: int | None = None) -> list[dict[str, float]]:
    """Save, and run a step of this number while the state is written. Returns the step's metrics."""
    copied = group.broadcast(TrainWorker.start_save, str(directory), CONTENTS, timeout=LIMIT)
    assert all(size > 0 for size in copied)
    metrics = update(group, then) if then else []
    while not all(group.broadcast(TrainWorker.finished_save, timeout=LIMIT)):
        time.sleep(0.01)
    return metrics


def weights(group: Group, directory: Path, name: str = "actor") -> dict[str, Tensor]:
    group.broadcast(TrainWorker.export, str(directory / name), "float32", name, timeout=LIMIT)
    return AutoModelForCausalLM.from_pretrained(directory / name).state_dict()


def test_another_group_resumes_exactly(two, tmp_path):
    uninterrupted, other = two
    update(uninterrupted, 1)
    uninterrupted.broadcast(TrainWorker.refresh, "reference", 1.0, timeout=LIMIT)
    expected_metrics = write(uninterrupted, tmp_path / "saved", then=2) + update(uninterrupted, 3)
    load(other, tmp_path / "saved")
    assert update(other, 2) + update(other, 3) == expected_metrics
    for name in ("actor", "reference"):
        expected, actual = (
            weights(uninterrupted, tmp_path / "uninterrupted", name),
            weights(other, tmp_path / "other", name),
        )
        assert all(torch.equal(actual[parameter], expected[parameter]) for parameter in expected)


def test_dropout_is_that_of_the_step(two):
    one, other = two
    assert update(one, 1) == update(other, 1)
    assert update(one, 2) != update(other, 3), "from the same weights"


def test_without_the_optimizer_only_the_model_resumes(two, tmp_path):
    one, other = two
    first = update(one, 1)
    second = write(one, tmp_path / "saved", then=2)
    load(other, tmp_path / "saved", {name: ["model"] for name in CONTENTS})
    for actual, with_it, fresh in zip(update(other, 2), second, first, strict=True):
        assert actual["loss"] == with_it["loss"] and actual["lr"] == fresh["lr"] != with_it["lr"]


@pytest.mark.slow
def test_training_can_start_from_a_saved_actor_which_has_its_settings(start, tmp_path):
    group = start(1)
    update(group, 1)
    expected = weights(group, tmp_path / "exported")
    write(group, tmp_path / "sharded")
    critic = AutoConfig.from_pretrained(tmp_path / "sharded" / "critic" / "huggingface")
    assert critic.dtype == torch.bfloat16, "the compute type"
    exported = str(tmp_path / "saved" / "critic" / "huggingface")
    group.broadcast(TrainWorker.export, exported, "float16", "critic", timeout=LIMIT)
    write(group, tmp_path / "saved", then=2)
    settings = {path.name: AutoConfig.from_pretrained(path / "huggingface") for path in (tmp_path / "saved").iterdir()}
    assert settings.keys() == CONTENTS.keys()
    assert settings["actor"].architectures == ["GPT2LMHeadModel"] and settings["actor"].dtype == torch.float32
    assert settings["critic"].dtype == torch.float16, "the type of the exported weights next to it"
    actual = weights(start(1, str(tmp_path / "saved" / "actor")), tmp_path / "again")
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
