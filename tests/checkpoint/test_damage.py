"""A checkpoint as runs write it, of which every file in turn is truncated, changed by a byte, or removed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
import yaml
from transformers import AutoModelForCausalLM

from hybridrl.checkpoint.export import export_settings
from hybridrl.checkpoint.read import check_parts
from hybridrl.checkpoint.resume import check_compatible, select_checkpoint
from hybridrl.checkpoint.saver import Save, SavePlan, Saver, SaveTimes
from hybridrl.checkpoint.store import LATEST, Store
from hybridrl.config import ConfigError
from hybridrl.config.files import HUGGINGFACE
from hybridrl.core.training.state import StateWriter, state_of
from hybridrl.required import required
from tests.core.training.families import FAMILIES
from tests.core.training.test_state import ALL, build, train

CONFIG = {"trainer": {"seed": 1}}
STATE = {
    "prompts": 8,
    "kl_weight": 0.001,
    "fault_steps": 0,
    "skipped_in_a_row": {"actor": 0, "critic": 0},
    "sinks": {},
    "data": "rows",
    "metrics": {"val/score": 0.5},
    "recovery": False,
    "healthy": True,
}
OLDER, NEWER = "global_step_1", "global_step_2"


class OneRank:
    """Stands in for the training ranks: saves a model as they do."""

    def __init__(self, path: str) -> None:
        self.learner, self.writer, self.updates_begun = build(path), StateWriter("cpu"), 0
        train(self.learner, range(1))

    def start_save(self, directory: Path, contents: dict[str, list[str]]) -> None:
        state = state_of(self.learner.model, self.learner.optimizers, contents["actor"])
        self.writer.start({directory / "actor": state})
        model = self.learner.model.model
        export_settings(model, directory / "actor" / HUGGINGFACE, model.dtype)

    def finished_save(self) -> bool:
        return self.writer.finished()


def tokenizer_files(directory: Path) -> None:
    (directory / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run's directory with two checkpoints."""
    model, run = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("run")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    AutoModelForCausalLM.from_config(FAMILIES["two heads a key"]).save_pretrained(model)
    store = Store(run)
    times = SaveTimes(steps=1, epochs=None, seconds=None, recovery_seconds=-1)
    plan = SavePlan({"actor": list(ALL)}, times, tokenizer_files, yaml.safe_dump(CONFIG), STATE)
    saver = Saver(OneRank(str(model)), store, plan, {}, SimpleNamespace(state_dict=dict))
    for step in (1, 2):
        saver.completed(step, {}, "")
        saver.start(Save.KEPT)
    saver.finish()
    store.close()
    dist.destroy_process_group()
    return run


@pytest.fixture
def run(saved, tmp_path) -> Path:
    """A copy by hard links: a file is damaged by replacing it."""
    return shutil.copytree(saved, tmp_path / "run", copy_function=os.link)


def truncate(path: Path) -> list[bytes]:
    content = path.read_bytes()
    return [content[:-1], content[: len(content) // 2], b""]


def flip(path: Path) -> list[bytes]:
    """Flip a bit in each byte of a small file, and in some bytes of a large one."""
    content = path.read_bytes()
    places = range(0, len(content), max(len(content) // 50, 1))
    return [
        content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :] for place in (*places, -1 % len(content))
    ]


def remove(path: Path) -> list[None]:
    return [None]


def each(run: Path, step: str, damage: Callable[[Path], list[bytes | None]]):
    """Yield every file of a checkpoint by name, damaged in every way in turn, and then restored."""
    files = sorted(path for path in (run / step).rglob("*") if path.is_file())
    assert {path.name for path in files} >= {"state.json", "manifest.json", "config.yaml", ".metadata", "config.json"}
    for path in files:
        content = path.read_bytes()
        for damaged in damage(path):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            yield path.relative_to(run / step).as_posix()
        path.unlink(missing_ok=True)
        path.write_bytes(content)


def choose(run: Path, *named: str):
    """Return the checkpoint that a run resumes from, and what is logged."""
    logged: list[str] = []
    mode, path = ("resume_path", str(run / named[0])) if named else ("auto", None)
    checkpoint = select_checkpoint(mode, path, run, "fingerprint", logged.append)
    return checkpoint, logged


@pytest.mark.parametrize("damage", [truncate, flip, remove])
def test_any_damaged_file_is_named_and_the_older_checkpoint_is_used(run, damage):
    assert required(choose(run)[0]).path == run / NEWER
    for name in each(run, NEWER, damage):
        checkpoint, logged = choose(run)
        assert required(checkpoint).path == run / OLDER
        assert len(logged) == 1 and logged[0].startswith(f"{run / NEWER} is skipped: {name}: "), name
    assert required(choose(run)[0]).path == run / NEWER


@pytest.mark.parametrize("damage", [truncate, flip, remove])
def test_damage_to_an_older_checkpoint_does_not_affect_the_newest(run, damage):
    for name in each(run, OLDER, damage):
        checkpoint, logged = choose(run)
        assert (required(checkpoint).path, logged) == (run / NEWER, []), name


@pytest.mark.parametrize("damage", [truncate, flip, remove])
def test_a_damaged_checkpoint_that_was_requested_is_used_with_a_warning_or_rejected(run, damage):
    for name in each(run, NEWER, damage):
        try:
            checkpoint, logged = choose(run, NEWER)
        except ConfigError as error:
            assert name in ("state.json", "actor/.metadata", "manifest.json") and f": {name}: " in str(error)
            assert name != "manifest.json" or damage is not remove
            continue
        assert f": {name}: " in logged[0] and logged[0].endswith("using it anyway, as requested")
        check_compatible(checkpoint, CONFIG | {"critic": {"enable": False}}, "rows", [], False, logged.append)
        check_parts(required(checkpoint).path / "actor", ALL)


@pytest.mark.parametrize("text", [b"", b"2\n", b"1", b"99", b"-1", b"\xff\x00", None], ids=repr)
def test_the_file_that_names_the_latest_step_is_ignored(run, text):
    (run / LATEST).unlink()
    if text is not None:
        (run / LATEST).write_bytes(text)
    assert required(choose(run)[0]).path == run / NEWER


def test_a_half_written_directory_of_a_killed_run_is_not_a_checkpoint(run):
    shutil.copytree(run / NEWER, run / ".global_step_3.writing")
    assert required(choose(run)[0]).path == run / NEWER
    Store(run).close()
    assert not (run / ".global_step_3.writing").exists()


def test_a_checkpoint_may_be_a_link(run, tmp_path):
    (run / NEWER).rename(tmp_path / "large disk")
    (run / NEWER).symlink_to(tmp_path / "large disk")
    assert required(choose(run)[0]).path == run / NEWER
    assert required(choose(run, NEWER)[0]).path == run / NEWER
    (run / "best").symlink_to(OLDER)
    assert required(choose(run, "best")[0]).path == run / OLDER


def test_retention_removes_only_the_link_to_a_checkpoint(run, tmp_path):
    (run / OLDER).rename(tmp_path / "large disk")
    (run / OLDER).symlink_to(tmp_path / "large disk")
    store = Store(run, keep=1)
    (store.begin(3) / "weights").write_text("3")
    store.publish(3, STATE)
    store.close()
    assert sorted(path.name for path in run.glob("*global_step*")) == ["global_step_3"]
    assert (tmp_path / "large disk" / "state.json").is_file()


def test_a_broken_link_is_named_and_skipped(run, tmp_path):
    (run / "global_step_9").symlink_to(tmp_path / "gone")
    checkpoint, logged = choose(run)
    assert required(checkpoint).path == run / NEWER and logged == [
        f"{run / 'global_step_9'} is skipped: manifest.json: missing"
    ]
    with pytest.raises(ConfigError, match="there is no such checkpoint"):
        choose(run, "global_step_9")


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_over_without_a_word(run):
    for step in (OLDER, NEWER):
        (run / step / "state.json").unlink()
    with pytest.raises(ConfigError, match=rf"none of its checkpoints .*resume_from_path={run / NEWER}, or start from"):
        choose(run)
    assert select_checkpoint("disable", None, run, "fingerprint", pytest.fail) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser can read everything")
def test_a_checkpoint_without_read_permission_is_named_and_skipped(run):
    (run / NEWER).chmod(0)
    checkpoint, logged = choose(run)
    (run / NEWER).chmod(0o700)
    assert required(checkpoint).path == run / OLDER
    assert logged == [f"{run / NEWER} is skipped: manifest.json: cannot be read (Permission denied)"]


@pytest.mark.parametrize("place", ["", "elsewhere", "actor"])
def test_a_path_that_is_not_a_checkpoint_is_rejected(run, place):
    with pytest.raises(ConfigError, match=r"there is no such checkpoint; name one, .*/global_step_N"):
        choose(run, f"{NEWER}/{place}" if place == "actor" else place)
