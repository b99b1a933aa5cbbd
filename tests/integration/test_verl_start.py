"""A run that verl started resumes here, in the same directory, on another number of ranks."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from hybridrl.checkpoint.read import open_tensors
from tests.compat.verl.files import TRUTH, UPDATES, save_as_verl
from tests.core.training.on_ranks import on_ranks
from tests.integration.test_run import finish, metrics, start

pytestmark = pytest.mark.slow

RANKS, STEP = 2, 2
LOADER = {
    "_sampler_iter_yielded": STEP,
    "_sampler_iter_state": {"samples_yielded": 8 * STEP, "sampler_iter_state": None},
    "_num_yielded": STEP,
}


def save(step: Path, model: Path) -> None:
    save_as_verl(step / "actor", "fsdp2", like=model)
    save_as_verl(step / "critic", "fsdp1", like=model, value=True)
    torch.save(LOADER, step / "data.pt")


def test_it_resumes_from_the_newest_intact_checkpoint_with_weights_moments_and_position(overrides, tiny, tmp_path):
    intact, damaged = (tmp_path / f"global_step_{step}" for step in (STEP, STEP + 1))
    on_ranks(RANKS, save, intact, tiny / "model")
    shutil.copytree(intact, damaged)
    os.truncate(damaged / "actor" / f"optim_world_size_{RANKS}_rank_1.pt", 1000)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(STEP + 1))
    settings = {
        "trainer.n_gpus_per_node": 1,
        "algorithm.adv_estimator": "gae",
        "critic.enable": True,
        "critic.model.path": tiny / "model",
        "actor_rollout_ref.actor.optim.lr": 0.0,
        "critic.optim.lr": 0.0,
        "trainer.total_training_steps": STEP + 1,
    }
    output = finish(start("main_ppo", overrides(tmp_path, settings)))
    assert f"{damaged} is skipped: " in output and f"optim_world_size_{RANKS}_rank_1.pt cannot be read" in output
    assert f"{intact} was saved by verl" in output
    assert f"resuming after step {STEP}, restored from {intact}" in output
    assert f"update {UPDATES} of actor, update {UPDATES} of critic" in output
    assert f"{8 * STEP} used" in output and "verl's own" in output
    assert [*metrics(tmp_path)] == [STEP + 1]
    for name in ("actor", "critic"):
        saved = open_tensors(tmp_path / f"global_step_{STEP + 1}" / name)
        expected, _ = torch.load(intact / name / TRUTH)
        for key in saved.meta:
            assert torch.equal(saved.read(key), expected[key]), f"{name}: {key}, at a learning rate of 0"
