"""Which of verl's steps a run goes on from, and how many prompts it had used."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.checkpoint.resume.select import saved_step
from hybridrl.checkpoint.resume.verl import prompts_used, state_from_verl
from hybridrl.checkpoint.saved import Saved
from hybridrl.checkpoint.store import Store
from hybridrl.checkpoint.verl import DataPosition
from hybridrl.config import ConfigError
from hybridrl.runs.sft import refuse_verl

GOOD = {"healthy": True, "recovery": False, "metrics": {}}


def verl(run: Path, step: int) -> Path:
    """A step as verl saves it on one rank."""
    actor = run / f"global_step_{step}" / "actor"
    actor.mkdir(parents=True)
    torch.save({"weight": torch.ones(2)}, actor / "model_world_size_1_rank_0.pt")
    (run / "latest_checkpointed_iteration.txt").write_text(str(step))
    return actor.parent


def ours(run: Path, step: int) -> Path:
    store = Store(run)
    (store.begin(step) / "weights").write_text("1")
    path = store.publish(step, GOOD).path
    store.close()
    return path


def choose(run: Path, mode: str = "auto", path: Path | None = None) -> tuple[Saved | None, list[str]]:
    said: list[str] = []
    return saved_step(mode, path and str(path), run, "fingerprint", said.append), said


def test_the_newest_step_of_verl_is_taken_and_said(tmp_path):
    verl(tmp_path, 10)
    newest = verl(tmp_path, 20)
    found, said = choose(tmp_path)
    assert found == Saved(20, newest, {})
    assert len(said) == 1 and said[0].startswith(f"{newest} was saved by verl: ")
    assert choose(tmp_path, "disable") == (None, [])


@pytest.mark.parametrize("latest", [None, "10", "99", "rubbish"])
def test_the_directories_are_believed_whatever_verls_file_of_the_latest_says(tmp_path, latest):
    newest = verl(tmp_path, 20)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    if latest:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(latest)
    assert choose(tmp_path)[0].path == newest


def test_a_step_that_verl_did_not_finish_is_named_and_passed_over(tmp_path):
    older, newer = verl(tmp_path, 10), verl(tmp_path, 20)
    (newer / "actor" / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')
    found, said = choose(tmp_path)
    assert found.path == older
    assert said[0].startswith(f"{newer} is passed over: ") and "model_world_size_2_rank_0.pt" in said[0]


@pytest.mark.parametrize("step", [5, 30])
def test_as_soon_as_the_run_has_a_good_step_of_its_own_verls_are_not_asked(tmp_path, step):
    verl(tmp_path, 20)
    own = ours(tmp_path, step)
    assert choose(tmp_path)[0].path == own
    assert choose(tmp_path)[1] == []


def test_where_no_own_step_is_good_verls_is_taken(tmp_path):
    path = verl(tmp_path, 20)
    os.truncate(ours(tmp_path, 25) / "weights", 0)
    found, said = choose(tmp_path)
    assert found.path == path
    assert said[0].startswith(f"{tmp_path / 'global_step_25'} is passed over: weights: ")


def test_retention_deletes_no_step_of_verls(tmp_path):
    path = verl(tmp_path, 1)
    store = Store(tmp_path, keep=1)
    for step in (2, 3):
        store.begin(step)
        store.publish(step, GOOD)
    store.close()
    assert path.is_dir() and not (tmp_path / "global_step_2").exists()


def test_an_explicit_path_is_taken_and_damage_told(tmp_path):
    older = verl(tmp_path, 10)
    verl(tmp_path, 20)
    assert choose(tmp_path, "resume_path", older) == (Saved(10, older, {}), [])
    os.truncate(older / "actor" / "model_world_size_1_rank_0.pt", 50)
    _, said = choose(tmp_path, "resume_path", older)
    assert len(said) == 1 and "model_world_size_1_rank_0.pt cannot be read" in said[0]
    with pytest.raises(ConfigError, match=r"name one, \.\.\./global_step_N"):
        choose(tmp_path, "resume_path", older / "actor")


def test_a_supervised_run_says_how_to_begin_from_it(tmp_path):
    path = verl(tmp_path, 10)
    with pytest.raises(ConfigError, match=rf"trainer\.resume_mode=disable model\.path={path}/actor"):
        refuse_verl(Saved(10, path, {}))


def test_prompts_are_told_by_the_data_loader_or_counted_and_it_is_said_which(tmp_path):
    path = verl(tmp_path, 3)
    told = {"prompts_per_step": 8, "rows": 100, "data": "rows", "kl_weight": 0.1}
    said: list[str] = []
    state = state_from_verl(3, path, **told, say=said.append)
    assert (state["prompts"], state["kl_weight"], state["data"]) == (24, 0.1, "rows")
    assert "24 (counted as 8 a step, as there is no data position: " in said[0] and "data.pt" in said[0]
    loader = {"_sampler_iter_yielded": 2, "_sampler_iter_state": {"samples_yielded": 16}, "_num_yielded": 2}
    torch.save(loader, path / "data.pt")
    assert state_from_verl(3, path, **told, say=said.append)["prompts"] == 16
    assert "16 (data.pt: 16 of them in the epoch then begun)" in said[1] and "order was verl's own" in said[1]


@pytest.mark.parametrize(
    ("step", "in_epoch", "used"),
    [(1, 4, 4), (5, 20, 20), (6, 4, 26), (10, 20, 42), (11, 4, 48)],
    ids=["first", "first epoch's last", "second epoch's first", "second epoch's last", "third epoch's first"],
)
def test_of_22_rows_verl_takes_five_batches_of_4_an_epoch_and_leaves_two(step, in_epoch, used):
    found = DataPosition(prompts=in_epoch, batch_size=4)
    assert prompts_used(found, step=step, prompts_per_step=4, rows=22) == used


@given(st.integers(1, 50), st.integers(1, 400), st.integers(1, 500))
def test_what_the_data_loader_says_and_what_is_counted_agree_up_to_what_verl_leaves_out(size, rows, step):
    batches = rows // size
    if not batches:
        return
    found = DataPosition(prompts=((step - 1) % batches + 1) * size, batch_size=size)
    told = prompts_used(found, step=step, prompts_per_step=size, rows=rows)
    counted = prompts_used(None, step=step, prompts_per_step=size, rows=rows)
    assert told == counted - (rows - batches * size if step % batches == 0 else 0)
