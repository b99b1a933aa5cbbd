"""Which models a name of `eval.models` leads to."""

import json
from pathlib import Path

import pytest

from hybridrl.checkpoint.files import write_manifest
from hybridrl.config import ConfigError
from hybridrl.evaluation.targets import find_targets


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three checkpoints; the second has the best validation, and the third is not healthy."""
    for step, (score, healthy) in {2: (0.25, True), 10: (0.75, True), 12: (0.9, False)}.items():
        directory = tmp_path / "my-run" / f"global_step_{step}"
        (directory / "actor").mkdir(parents=True)
        metrics = {"val-core/maths/acc/mean@1": score, "loss": -score}
        state = {"healthy": healthy, "recovery": False, "published": step, "metrics": metrics}
        (directory / "state.json").write_text(json.dumps(state))
        write_manifest(directory)
    return tmp_path / "my-run"


def found(*names: object, **options: object) -> list[tuple[str, str]]:
    return [(one.name, one.path) for one in find_targets([str(name) for name in names], **options)]


def test_a_run_is_its_last_healthy_checkpoint_its_best_or_all(run):
    ten = ("my-run-global_step_10", f"{run}/global_step_10/actor")
    two = ("my-run-global_step_2", f"{run}/global_step_2/actor")
    assert found(run) == found(f"{run}:last") == [ten]
    assert found(f"{run}:best") == [ten] and found(f"{run}:all") == [two, ten]
    assert found(f"{run}:best", keep_best="loss") == [two]


def test_a_step_of_a_run_is_its_checkpoint_whatever_its_health(run):
    twelve = ("my-run-global_step_12", f"{run}/global_step_12/actor")
    assert found(f"{run}:12", f"{run}:02") == [twelve, ("my-run-global_step_2", f"{run}/global_step_2/actor")]
    with pytest.raises(ConfigError, match=r"there is no checkpoint of step 3; choose 2 \| 10 \| 12"):
        found(f"{run}:3")


def test_a_run_is_its_last_checkpoint_that_has_a_model(run, tmp_path):
    shards = run / "global_step_10" / "actor" / ".metadata"
    shards.write_bytes(b"\x8c\x09optimizer.state")
    write_manifest(shards.parent.parent)
    assert found(run) == [("my-run-global_step_2", f"{run}/global_step_2/actor")]
    (run / "global_step_2" / "actor").rmdir()
    (run / "global_step_12" / "actor").rmdir()
    with pytest.raises(ConfigError, match=r"its checkpoints have no model; save one whose checkpoint.save_contents"):
        found(run)


def test_a_run_without_checkpoints_is_rejected_with_the_key_that_saves_some(tmp_path):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"has no checkpoints; name .* a run with trainer.save_freq=10 saves"):
        found(tmp_path)


def test_checkpoints_are_compared_by_the_data_sources_that_every_validation_has(run):
    for step, hard in ((2, 0.2), (10, 0.1)):
        file = run / f"global_step_{step}" / "state.json"
        state = json.loads(file.read_text())
        state["metrics"]["val-core/hard/acc/mean@1"] = hard
        if step == 2:  # no easy sample could be graded
            del state["metrics"]["val-core/maths/acc/mean@1"]
        file.write_text(json.dumps(state))
        write_manifest(file.parent)
    assert found(f"{run}:best") == [("my-run-global_step_2", f"{run}/global_step_2/actor")]


def test_a_checkpoint_is_its_policy(run):
    expected = [("my-run-global_step_2", f"{run}/global_step_2/actor")]
    assert found(run / "global_step_2") == found(run / "global_step_2" / "actor") == expected


def test_directories_hub_names_and_addresses_are_themselves(tmp_path):
    (tmp_path / "model").mkdir()
    assert found(tmp_path / "model", "Qwen/Qwen3-8B", "http://127.0.0.1:8000/v1/") == [
        ("model", str(tmp_path / "model")),
        ("Qwen3-8B", "Qwen/Qwen3-8B"),
        ("127-0-0-1-8000-v1", "http://127.0.0.1:8000/v1"),
    ]


def test_models_with_the_same_name_get_numbers(tmp_path):
    for parent in "ab":
        (tmp_path / parent / "model").mkdir(parents=True)
    assert [name for name, _ in found(tmp_path / "a" / "model", tmp_path / "b" / "model")] == ["model", "model-2"]


def test_checkpoints_of_verl_have_no_best_one(tmp_path):
    for step in (5, 40):
        actor = tmp_path / "verl" / f"global_step_{step}" / "actor"
        actor.mkdir(parents=True)
        (actor / "model_world_size_1_rank_0.pt").touch()
    assert [path for _, path in found(tmp_path / "verl")] == [f"{tmp_path}/verl/global_step_40/actor"]
    assert len(found(f"{tmp_path}/verl:all")) == 2
    with pytest.raises(ConfigError, match="no validation scores; evaluate all"):
        found(f"{tmp_path}/verl:best")


def test_names_that_lead_to_no_model_are_rejected_together(tmp_path, run):
    (tmp_path / "empty").mkdir()
    (tmp_path / "evaluated").mkdir()
    (tmp_path / "evaluated" / "results.json").write_text("{}")
    with pytest.raises(ConfigError) as error:
        found(f"{tmp_path}/empty:best", tmp_path / "evaluated", f"{run}:best", keep_best="val-core/other")
    text = str(error.value)
    with pytest.raises(ConfigError, match=r"eval.compare=.*:lst: lst is not a choice; choose best \| last \| all"):
        found(f"{run}:lst", key="eval.compare")
    assert "has no checkpoints" in text and "eval.compare" in text and "no checkpoint has a val-core/other" in text
