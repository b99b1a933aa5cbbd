from pathlib import Path

import pytest

from hybridrl.checkpoint.store import Store

LATEST = "latest_checkpointed_iteration.txt"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, lambda directory: (directory / "tokenizer.json").write_text("words"))


def weights(text: str):
    """An export of one file."""
    return lambda directory: (directory / "model.safetensors").write_text(text)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_step_holds_model_and_tokenizer_and_is_named_as_the_latest(store, tmp_path):
    place = store.save(5, actor=weights("five"))
    assert place == tmp_path / "global_step_5" / "actor" / "huggingface"
    assert names(place) == {"model.safetensors", "tokenizer.json"}
    assert (tmp_path / LATEST).read_text() == "5"
    assert names(tmp_path) == {"global_step_5", LATEST}


def test_later_steps_lie_beside_the_earlier_ones(store, tmp_path):
    store.save(5, actor=weights("five"))
    store.save(10, actor=weights("ten"))
    assert names(tmp_path) == {"global_step_5", "global_step_10", LATEST}
    assert (tmp_path / LATEST).read_text() == "10"


def test_a_step_is_not_to_be_seen_before_it_is_whole(store, tmp_path):
    def export(directory: Path) -> None:
        weights("five")(directory)
        assert not list(tmp_path.glob("global_step_*"))
        assert not (tmp_path / LATEST).exists()

    store.save(5, actor=export)


@pytest.mark.parametrize("error", [OSError("no space left on device"), KeyboardInterrupt()], ids=repr)
def test_an_export_that_fails_leaves_the_older_steps_and_nothing_of_its_own(store, tmp_path, error):
    def export(directory: Path) -> None:
        weights("half")(directory)
        raise error

    store.save(5, actor=weights("five"))
    with pytest.raises(type(error)):
        store.save(10, actor=export)
    assert names(tmp_path) == {"global_step_5", LATEST}
    assert (tmp_path / LATEST).read_text() == "5"
    assert (tmp_path / "global_step_5" / "actor" / "huggingface" / "model.safetensors").read_text() == "five"


def test_what_a_killed_run_left_behind_is_not_part_of_the_next_one(store, tmp_path):
    left = tmp_path / ".global_step_5.writing" / "actor" / "huggingface"
    left.mkdir(parents=True)
    (left / "old.safetensors").write_text("old")
    assert names(store.save(5, actor=weights("five"))) == {"model.safetensors", "tokenizer.json"}
    assert names(tmp_path) == {"global_step_5", LATEST}


def test_saving_a_step_again_replaces_it(store):
    store.save(5, actor=lambda directory: (directory / "old.safetensors").write_text("old"))
    place = store.save(5, actor=weights("new"))
    assert names(place) == {"model.safetensors", "tokenizer.json"}
