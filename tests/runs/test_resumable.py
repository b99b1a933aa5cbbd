"""From which checkpoints a run resumes, by what was saved in them: a start, a restart, the doctor and the page agree,
and a run that can resume from none starts from scratch and leaves what is there."""

import warnings
from collections.abc import Callable
from contextlib import closing, nullcontext
from itertools import chain, combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hybridrl.checkpoint.resume import select_checkpoint
from hybridrl.checkpoint.saver import WHOLE, Save, SavePlan, Saver, SaveTimes
from hybridrl.checkpoint.store import Store
from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.load import load_ppo_config, load_sft_config, resolve_config
from hybridrl.config.schema import SFTTrainerConfig
from hybridrl.core.cluster import WorkerDied
from hybridrl.doctor.__main__ import command
from hybridrl.doctor.leftovers import list_rows
from hybridrl.report.contents import Contents
from hybridrl.report.samples import ChosenSamples
from hybridrl.report.sections import checkpoints
from hybridrl.report.verdicts import lights
from hybridrl.runs.attempts import with_restarts
from hybridrl.runs.resume import Identity, contents_to_load, find_checkpoint
from hybridrl.runs.setup import open_checkpoints
from tests.sections import keys_of_run

PARTS = ("model", "optimizer", "extra", WHOLE)
ALL = list(PARTS[:3])
SUBSETS = [list(some) for some in chain.from_iterable(combinations(PARTS, size) for size in range(len(PARTS) + 1))]


class Models:
    """Stands in for the training ranks."""

    def __init__(self, weight: str) -> None:
        self.weight, self.updates_begun, self.finished_save = weight, 0, lambda: True

    def start_save(self, directory: Path, contents: dict[str, list[str]]) -> None:
        whole = {"model": {self.weight: torch.ones(2)}, "optimizer": {"state": {self.weight: torch.ones(2)}}}
        for name, parts in contents.items():
            (directory / name / "huggingface").mkdir(parents=True, exist_ok=True)
            if state := {part: (whole | {"extra": {"updates": 1}})[part] for part in parts}:
                with warnings.catch_warnings(action="ignore"):
                    dcp.save(state, checkpoint_id=directory / name, no_dist=True)

    def export(self, directory: Path, name: str) -> None:
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_text("whole")


def save(place: Store | Path, contents: dict[str, list[str]], *steps: int, weight: str = "weight") -> None:
    times = SaveTimes(steps=1, epochs=None, seconds=None, recovery_seconds=-1)
    plan = SavePlan(contents, times, lambda path: None, "trainer: {}\n", {"data": "rows", "prompts": 8, "sinks": {}})
    with closing(Store(place)) if isinstance(place, Path) else nullcontext(place) as store:
        saver = Saver(Models(weight), store, plan, {}, SimpleNamespace(state_dict=dict))
        for step in steps:
            saver.completed(step, {}, "")
            saver.start(Save.KEPT)
            saver.finish()
        saver.thread.shutdown()


def chosen_in(directory: Path, logged: list[str] | None = None) -> int | None:
    chosen = select_checkpoint("auto", None, directory, "run", [].append if logged is None else logged.append)
    return chosen and chosen.step


def trainer_of(directory: Path, *overrides: str) -> SFTTrainerConfig:
    place = [*keys_of_run(directory), f"trainer.default_local_dir={directory}", *overrides]
    return load_ppo_config(place).trainer


def restarts_from(directory: Path, load: Callable[[list[str]], Any], keys: list[str], saves: Callable[[], None]) -> str:
    """Return how the second attempt of a run starts that saves something and then loses a worker."""
    config, modes = load([*keys, f"trainer.default_local_dir={directory}", "trainer.max_restarts=1"]), []
    config.trainer.resume_mode = "disable"

    def attempt(_: object) -> None:
        modes.append(config.trainer.resume_mode)
        if len(modes) == 1:
            saves()
            raise WorkerDied("gone")

    with_restarts(attempt, config)
    return modes[1]


@pytest.mark.parametrize("kind", ["SFT", "RL", "LoRA"])
@pytest.mark.parametrize("subset", SUBSETS, ids=lambda subset: "+".join(subset) or "nothing")
def test_a_start_a_restart_the_doctor_and_the_page_agree_on_whether_a_run_resumes(tmp_path, capsys, subset, kind):
    run, path = tmp_path / "run", tmp_path / "run" / "global_step_2"
    contents = {"actor": ALL, "critic": subset} if kind == "RL" else {"actor": subset}
    weight = f"base_model.{'m' * 300}.lora_A.default.weight" if kind == "LoRA" else "model.layers.0.weight"
    load, keys = load_ppo_config, keys_of_run(tmp_path)
    if kind == "SFT":
        load, keys = load_sft_config, [keys[0], f"model.path={tmp_path}", keys[2]]
    run.mkdir()
    mode = restarts_from(run, load, keys, lambda: save(run, contents, 2, weight=weight))
    resumes, logged = "model" in subset, []
    assert mode == ("auto" if resumes else "disable")
    assert ("from the last checkpoint" in capsys.readouterr().out) == resumes

    assert (chosen_in(run, logged) == 2) == resumes == (not logged)
    assert resumes or (logged[0].startswith(f"{path} is skipped: ") and "starting from scratch" in logged[1])
    if resumes:
        loaded = contents_to_load(trainer_of(tmp_path), dict.fromkeys(contents, ALL), path)
        assert loaded == {name: [part for part in ALL if part in parts] for name, parts in contents.items()}
    else:
        error = rf"^trainer.resume_from_path={path}: .*no run resumes without the weights in shards"
        with pytest.raises(ConfigError, match=error):
            select_checkpoint("resume_path", str(path), run, "run", logged.append)

    (row,), _ = list_rows(run)
    assert row.resumes == resumes and bool(row.lacks) == (not {"model", "optimizer"} <= {*subset})
    assert command("checkpoints", [str(run)]) == (0 if resumes else 1)
    assert ("a run resumes here" in checkpoints(Contents(run))) == resumes
    light = next(one for one in lights(Contents(run), ChosenSamples()) if one.question == "Is it resumable?")
    assert light.state == ("bad" if not resumes else "good" if "optimizer" in subset else "fair")


def test_the_newest_checkpoint_with_weights_in_shards_is_taken_past_later_ones_without(tmp_path):
    save(tmp_path, {"actor": ALL}, 1, 2)
    save(tmp_path, {"actor": [WHOLE]}, 3)
    assert chosen_in(tmp_path, logged := []) == 2
    assert logged == [f"{tmp_path}/global_step_3 is skipped: model only"]


def test_damage_keeps_a_run_from_starting_only_where_weights_in_shards_may_have_been_lost(tmp_path):
    save(tmp_path, {"actor": [WHOLE]}, 1)
    (tmp_path / "global_step_1" / "actor" / "huggingface" / "model.safetensors").write_text("other")
    assert chosen_in(tmp_path) is None
    (tmp_path / "global_step_1" / "manifest.json").unlink()  # by which it is known what was saved
    with pytest.raises(ConfigError, match=r"manifest\.json: missing"):
        chosen_in(tmp_path)
    save(tmp_path, {"actor": ALL}, 2)
    (tmp_path / "global_step_2" / "actor" / ".metadata").unlink()  # it was saved, and is lost
    with pytest.raises(ConfigError, match=r"none of its checkpoints is intact .*actor/.metadata: missing"):
        chosen_in(tmp_path)


def test_a_run_that_is_to_start_from_scratch_replaces_what_is_there(tmp_path):
    save(tmp_path, {"actor": [WHOLE]}, 1, 2)
    trainer = trainer_of(tmp_path, "trainer.resume_mode=disable", "trainer.max_actor_ckpt_to_keep=1")
    with closing(open_checkpoints(trainer, tmp_path)) as store:
        save(store, {"actor": [WHOLE]}, 1)
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_1"]


@pytest.mark.parametrize(("mode", "again"), [("auto", False), ("auto", True), ("disable", True)])
def test_a_run_that_starts_from_scratch_leaves_every_earlier_checkpoint_as_it_is(tmp_path, capsys, mode, again):
    trainer = trainer_of(tmp_path, f"trainer.resume_mode={mode}", "trainer.max_actor_ckpt_to_keep=1")
    save(tmp_path, {"actor": [WHOLE]}, 1, 2, 4)
    for parts, last in (([WHOLE], 6), (ALL, 8)):
        earlier = {path: path.stat().st_mtime_ns for path in tmp_path.glob("global_step_*/**/*")}
        steps = {*tmp_path.glob("global_step_*")}
        with closing(open_checkpoints(trainer, tmp_path, again=again)) as store:
            save(store, {"actor": parts}, *range(1, last + 1))
        assert {path: path.stat().st_mtime_ns for path in earlier if path.exists()} == earlier
        # Retention is of the run's own checkpoints.
        assert {*tmp_path.glob("global_step_*")} == steps | {tmp_path / f"global_step_{last}"}
        assert f"step 4 is not saved: {tmp_path}/global_step_4, of an earlier attempt" in capsys.readouterr().out


def test_moments_that_were_not_saved_are_an_error_where_the_checkpoint_was_named(tmp_path):
    save(tmp_path, {"actor": ["model"]}, 1)
    path = tmp_path / "global_step_1"
    named = trainer_of(tmp_path, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}")
    with pytest.raises(ConfigError, match=r"no optimizer and extra was saved .*trainer\.reset_optimizer=true resumes"):
        contents_to_load(named, {"actor": ALL}, path)
    assert contents_to_load(named, {"actor": [WHOLE]}, path) == {"actor": ["model"]}


@pytest.mark.parametrize("other", [False, True], ids=["a later stage", "another run"])
def test_a_run_that_continues_a_named_checkpoint_resumes_from_its_own_once_it_has_one(tmp_path, monkeypatch, other):
    monkeypatch.setattr("hybridrl.runs.resume.check_compatible", lambda *arguments: None)
    own = tmp_path / "run"
    before = tmp_path / "other" if other else own
    begin = f"trainer.resume_from_path={before}/global_step_3"
    trainer = trainer_of(tmp_path, begin, "trainer.experiment_name=second", f"trainer.default_local_dir={own}")

    def chosen() -> Path:
        found = find_checkpoint(trainer, {}, own, Identity("data", "run", {}), say=print)
        assert found is not None
        return found.path

    cause = "there is no such checkpoint" if other else r"second continues from global_step_3 .* is at no step"
    with pytest.raises(ConfigError, match=cause):
        chosen()
    save(before, {"actor": ALL}, 2)
    if not other:
        with pytest.raises(ConfigError, match=r"second continues from global_step_3 .* is at step 2; first run what"):
            chosen()
    save(before, {"actor": ALL}, 3)
    assert chosen() == before / "global_step_3"
    save(own, {"actor": ALL}, 4)
    assert chosen() == own / "global_step_4"
    assert trainer.resume_mode == "auto"  # by the same command


@pytest.mark.parametrize("path", ["checkpoints/", "run/global_step_3/actor", "run/global_step_last"])
def test_a_path_that_is_no_checkpoint_has_no_effect_as_in_verl(tmp_path, path):
    words = [*keys_of_run(tmp_path), f"trainer.resume_from_path={path}"]
    found = resolve_config(PPOConfig, words, "ppo_trainer").findings
    assert [each.cause for each in found.items if "trainer.resume_from_path" in each.keys] == [
        "has no effect with trainer.resume_mode=auto, as it is no .../global_step_N"
    ]
    trainer = trainer_of(tmp_path, f"trainer.resume_from_path={path}")
    assert find_checkpoint(trainer, {}, tmp_path, Identity("data", "run", {}), say=print) is None
