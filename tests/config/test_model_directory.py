from pathlib import Path

import pytest

from hybridrl.config.model_directory import is_sharded, resolve_model
from hybridrl.config.values import ModelPath


@pytest.fixture(params=[".metadata", "model_world_size_2_rank_0.pt"], ids=["ours", "verl's"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The actor of a saved step, in shards."""
    actor = tmp_path / "global_step_7" / "actor"
    (actor / "huggingface").mkdir(parents=True)
    (actor / "huggingface" / "config.json").write_text("{}")
    (actor / request.param).touch()
    return actor


def test_of_a_saved_model_all_but_the_weights_lies_below_it(saved: Path) -> None:
    assert resolve_model(str(saved)) == saved / "huggingface"
    assert is_sharded(str(saved))


def test_a_hugging_face_directory_is_itself(saved: Path) -> None:
    below = saved / "huggingface"
    assert resolve_model(str(below)) == below and not is_sharded(str(below))
    (saved / "config.json").touch()
    assert resolve_model(str(saved)) == saved


def test_a_name_of_the_hub_is_left_as_it_is() -> None:
    assert str(resolve_model("Qwen/Qwen2.5-0.5B")) == "Qwen/Qwen2.5-0.5B"
    assert not is_sharded("Qwen/Qwen2.5-0.5B")


def test_a_saved_model_is_a_model_path(saved: Path) -> None:
    assert ModelPath().fault(str(saved)) is None


def test_so_is_one_with_whole_weights_and_no_shards(saved: Path) -> None:
    next(path for path in saved.iterdir() if path.is_file()).unlink()
    assert "no weights" in (ModelPath().fault(str(saved)) or "")
    (saved / "huggingface" / "model.safetensors").touch()
    assert ModelPath().fault(str(saved)) is None


def test_a_saved_model_without_its_configuration_is_refused(saved: Path) -> None:
    (saved / "huggingface" / "config.json").unlink()
    assert ModelPath().fault(str(saved)) == "the directory has no config.json, so it is no Hugging Face model"


def test_the_folder_that_was_meant_is_named(saved: Path) -> None:
    assert (ModelPath().fault(str(saved / "huggingface")) or "").endswith(f"; name that: {saved}")
    assert (ModelPath().fault(str(saved.parent)) or "").endswith(f"name the one that is meant: {saved}")
