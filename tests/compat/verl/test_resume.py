"""Which verl checkpoint a run resumes from, and how many prompts it had used."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.checkpoint.resume import select_checkpoint
from hybridrl.checkpoint.store import Checkpoint, Store
from hybridrl.compat.verl.checkpoint import DataPosition, prompts_used, state_from_verl
from hybridrl.config import ConfigError
from hybridrl.required import required
from hybridrl.runs.resume import Identity, find_checkpoint

GOOD = {"healthy": True, "recovery": False, "metrics": {}}


def verl(run: Path, step: int) -> Path:
    """Write a checkpoint as verl saves it on one rank."""
    actor = run / f"global_step_{step}" / "actor"
    actor.mkdir(parents=True)
    torch.save({"weight": torch.ones(2)}, actor / "model_world_size_1_rank_0.pt")
    (run / "latest_checkpointed_iteration.txt").write_text(str(step))
    return actor.parent


def save_here(run: Path, step: int) -> Path:
    store = Store(run)
    (store.begin(step) / "weights").write_text("1")
    path = store.publish(step, GOOD).path
    store.close()
    return path


def choose(run: Path, mode: str = "auto", path: Path | None = None) -> tuple[Checkpoint | None, list[str]]:
    logged: list[str] = []
    return select_checkpoint(mode, path and str(path), run, "fingerprint", logged.append), logged


def test_the_newest_verl_checkpoint_is_used_and_logged(tmp_path):
    verl(tmp_path, 10)
    newest = verl(tmp_path, 20)
    checkpoint, logged = choose(tmp_path)
    assert checkpoint == Checkpoint(20, newest, {})
    assert len(logged) == 1 and logged[0].startswith(f"{newest} was saved by verl: ")
    assert choose(tmp_path, "disable") == (None, [])


def test_verls_file_of_the_latest_step_is_ignored(tmp_path):
    newest, file = verl(tmp_path, 20), tmp_path / "latest_checkpointed_iteration.txt"
    for latest in ("10", "99", "rubbish"):
        file.write_text(latest)
        assert required(choose(tmp_path)[0]).path == newest
    file.unlink()
    assert required(choose(tmp_path)[0]).path == newest


def test_an_unfinished_verl_checkpoint_is_named_and_skipped(tmp_path):
    older, newer = verl(tmp_path, 10), verl(tmp_path, 20)
    (newer / "actor" / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')
    checkpoint, logged = choose(tmp_path)
    assert required(checkpoint).path == older
    assert logged[0].startswith(f"{newer} is skipped: ") and "model_world_size_2_rank_0.pt" in logged[0]


@pytest.mark.parametrize("step", [5, 30])
def test_verl_checkpoints_are_not_used_once_the_run_has_a_good_one(tmp_path, step):
    verl(tmp_path, 20)
    checkpoint = save_here(tmp_path, step)
    assert required(choose(tmp_path)[0]).path == checkpoint
    assert choose(tmp_path)[1] == []


def test_without_a_good_checkpoint_verls_is_used(tmp_path):
    path = verl(tmp_path, 20)
    os.truncate(save_here(tmp_path, 25) / "weights", 0)
    checkpoint, logged = choose(tmp_path)
    assert required(checkpoint).path == path
    assert logged[0].startswith(f"{tmp_path / 'global_step_25'} is skipped: weights: ")


def test_retention_deletes_no_verl_checkpoint(tmp_path):
    path = verl(tmp_path, 1)
    store = Store(tmp_path, keep=1)
    for step in (2, 3):
        store.begin(step)
        store.publish(step, GOOD)
    store.close()
    assert path.is_dir() and not (tmp_path / "global_step_2").exists()


def test_an_explicit_path_is_used_and_damage_logged(tmp_path):
    older = verl(tmp_path, 10)
    verl(tmp_path, 20)
    assert choose(tmp_path, "resume_path", older) == (Checkpoint(10, older, {}), [])
    os.truncate(older / "actor" / "model_world_size_1_rank_0.pt", 50)
    _, logged = choose(tmp_path, "resume_path", older)
    assert len(logged) == 1 and "model_world_size_1_rank_0.pt cannot be read" in logged[0]
    with pytest.raises(ConfigError, match=r"name one, \.\.\./global_step_N"):
        choose(tmp_path, "resume_path", older / "actor")


def test_a_supervised_run_rejects_it_with_a_fix(tmp_path):
    path = verl(tmp_path, 10)
    trainer: Any = SimpleNamespace(resume_mode="resume_path", resume_from_path=str(path))
    with pytest.raises(ConfigError, match=rf"trainer\.resume_mode=disable model\.path={path}/actor"):
        find_checkpoint(trainer, {}, tmp_path, Identity("data", "run", {}))


def test_used_prompts_come_from_the_data_loader_or_are_counted(tmp_path):
    path = verl(tmp_path, 3)
    settings = {"prompts_per_step": 8, "rows": 100, "data": "rows", "kl_weight": 0.1}
    logged: list[str] = []
    state = state_from_verl(3, path, **settings, log=logged.append)
    assert (state["prompts"], state["kl_weight"], state["data"]) == (24, 0.1, "rows")
    assert "24 (counted as 8 per step, as there is no data position: " in logged[0] and "data.pt" in logged[0]
    loader = {"_sampler_iter_yielded": 2, "_sampler_iter_state": {"samples_yielded": 16}, "_num_yielded": 2}
    torch.save(loader, path / "data.pt")
    assert state_from_verl(3, path, **settings, log=logged.append)["prompts"] == 16
    assert "16 (data.pt: 16 of them in the epoch then current)" in logged[1] and "order was verl's own" in logged[1]


@pytest.mark.parametrize(
    ("step", "in_epoch", "used"),
    [(1, 4, 4), (5, 20, 20), (6, 4, 26), (10, 20, 42), (11, 4, 48)],
    ids=["first", "first epoch's last", "second epoch's first", "second epoch's last", "third epoch's first"],
)
def test_of_22_rows_verl_uses_five_batches_of_4_per_epoch_and_drops_two(step, in_epoch, used):
    position = DataPosition(prompts=in_epoch, batch_size=4)
    assert prompts_used(position, step=step, prompts_per_step=4, rows=22) == used


@given(st.integers(1, 50), st.integers(1, 400), st.integers(1, 500))
def test_the_data_loader_and_the_count_differ_by_what_verl_drops(size, rows, step):
    batches = rows // size
    if not batches:
        return
    position = DataPosition(prompts=((step - 1) % batches + 1) * size, batch_size=size)
    read = prompts_used(position, step=step, prompts_per_step=size, rows=rows)
    counted = prompts_used(None, step=step, prompts_per_step=size, rows=rows)
    assert read == counted - (rows - batches * size if step % batches == 0 else 0)
