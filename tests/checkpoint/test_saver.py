"""When a step is saved, and what its state.json has."""

import json
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.checkpoint.files import write_manifest
from hybridrl.checkpoint.saver import Save, SavePlan, Saver, SaveTimes
from hybridrl.checkpoint.store import SaveFailed, Store, damage_of, list_checkpoints


def times(steps=0, epochs=None, seconds=None, recovery_seconds: float | None = 600.0) -> SaveTimes:
    return SaveTimes(steps, epochs, seconds, recovery_seconds)


def kept(chosen: SaveTimes, steps: int, prompts_per_step: int, rows: int = 8) -> list[int]:
    """The steps that are kept, of a run in which no time passes."""
    epochs = [step * prompts_per_step / rows for step in range(steps + 1)]
    return [step for step in range(1, steps + 1) if chosen.keeps(step, (epochs[step - 1], epochs[step]), 0.0)]


@pytest.mark.parametrize(
    ("every", "steps", "prompts_per_step", "expected"),
    [
        (times(steps=4), 10, 3, [4, 8]),
        (times(epochs=1), 10, 3, [3, 6, 8]),  # 3 prompts a step of 8 rows: prompts 8, 16 and 24 in these steps
        (times(epochs=0.5), 6, 3, [2, 3, 4, 6]),
        (times(epochs=2), 10, 3, [6]),
        (times(epochs=1), 3, 20, [1, 2, 3]),  # more than an epoch in a step is saved once
        (times(steps=5, epochs=1), 10, 3, [3, 5, 6, 8, 10]),  # the two add up
    ],
)
def test_steps_are_kept_by_number_and_by_epochs_whatever_the_batch_size(every, steps, prompts_per_step, expected):
    assert kept(every, steps, prompts_per_step) == expected


def test_after_so_many_seconds():
    assert times(seconds=60).keeps(7, (0.1, 0.2), seconds=60.0)
    assert not times(seconds=60).keeps(7, (0.1, 0.2), seconds=59.9)


@pytest.mark.parametrize(("chosen", "keeps"), [(times(-1), False), (times(-1, epochs=1), True), (times(0), True)])
def test_recovery_does_not_depend_on_whether_any_step_is_kept(chosen, keeps):
    assert chosen.keeps_any is keeps
    assert chosen.ever and chosen.recovers(10_000.0, cost=0.0)


def test_nothing_is_ever_saved_where_both_are_switched_off():
    assert not times(-1, recovery_seconds=-1).ever


def test_a_recovery_save_is_due_after_its_seconds_and_never_where_they_are_switched_off():
    assert times(recovery_seconds=600).recovers(600.0, cost=100.0)
    assert not times(recovery_seconds=600).recovers(599.0, cost=0.0)
    assert not times(recovery_seconds=-1).recovers(10_000.0, cost=0.0)


def test_without_a_frequency_a_recovery_save_is_due_once_the_last_one_was_one_percent_of_the_time_since():
    automatic = times(-1, recovery_seconds=None)
    assert automatic.ever
    assert automatic.recovers(0.0, cost=0.0)  # after the first step: what a save costs is not known yet
    assert automatic.recovers(60.0, cost=0.6)
    assert not automatic.recovers(59.9, cost=0.6)
    assert automatic.recovers(600.0, cost=60.0)  # at the latest


class Part:
    """A part of a run with this state."""

    def __init__(self, **state: object) -> None:
        self.state = state

    def state_dict(self) -> dict[str, object]:
        return self.state


class Models:
    """Training workers that write the shards of the actor when `write` is called, or fail to."""

    def __init__(self, *, at_once: bool = True, error: str = "") -> None:
        self.at_once, self.error = at_once, error
        self.updates_begun = 0
        self.directory = Path()

    def start_save(self, directory: Path, contents: dict[str, list[str]]) -> None:
        self.directory = directory
        if self.at_once:
            self.write()

    def write(self) -> None:
        (self.directory / "actor").mkdir(exist_ok=True)
        (self.directory / "actor" / "__0_0.distcp").write_text("weights")
        (self.directory / "actor" / ".metadata").write_text("index")

    def finished_save(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return (self.directory / "actor" / ".metadata").exists() or not self.directory.exists()


@pytest.fixture
def store(tmp_path):
    with closing(Store(tmp_path / "run")) as store:
        yield store


def saver_of(models: Models, store: Store, saved: SaveTimes | None = None, **parts: Part) -> Saver:
    fixed = {"data": "d", "fingerprint": "f"}
    plan = SavePlan({"actor": ["model"]}, saved or times(1), lambda directory: None, "", fixed)
    return Saver(models, store, plan, parts, Part(sinks={}))


def save(saver: Saver, step: int = 1, kind: Save = Save.KEPT) -> None:
    saver.completed(step, {}, "")
    saver.start(kind)
    saver.finish()


def state(store: Store, step: int) -> dict[str, object]:
    return json.loads((store.directory / f"global_step_{step}" / "state.json").read_text())


def test_the_state_of_every_part_lies_in_state_json_with_what_identifies_the_run(store):
    parts = {"experience": Part(prompts=8, fault_steps=0), "algorithm": Part(kl_weight=0.5)}
    saver = saver_of(Models(), store, **parts)
    saver.completed(3, {"val/loss": 1.0}, "an update was not finite")
    saver.start(Save.RECOVERY)
    saver.finish()
    assert state(store, 3) == {
        "step": 3,
        "data": "d",
        "fingerprint": "f",
        "prompts": 8,
        "fault_steps": 0,
        "kl_weight": 0.5,
        "sinks": {},
        "metrics": {"val/loss": 1.0},
        "recovery": True,
        "healthy": False,
        "reason": "an update was not finite",
        "published": 1,
        "sharded": ["actor"],
    }


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def test_a_checkpoint_is_published_during_the_next_step_as_soon_as_it_is_on_disk(store):
    models = Models(at_once=False)
    saver = saver_of(models, store)
    saver.completed(1, {}, "")
    saver.start(Save.KEPT)
    time.sleep(0.3)
    assert not list_checkpoints(store.directory)
    models.write()
    wait_for(store.directory / "global_step_1")  # nobody called poll
    saver.close()


def interrupted(store: Store, *, written: bool) -> None:
    """Leave the directory as a run that is killed while step 2 is saved."""
    models = Models(at_once=False)
    saver = saver_of(models, store)
    saver.completed(2, {}, "")
    saver.start(Save.KEPT)
    saver.close()
    if written:
        models.write()
    store.close()


@pytest.mark.parametrize("being_published", [False, True])
def test_a_checkpoint_that_is_complete_when_its_run_ends_is_published_at_the_next_start(store, being_published):
    interrupted(store, written=True)
    if being_published:
        write_manifest(store.directory / ".global_step_2.writing")
    with closing(Store(store.directory)):
        (checkpoint,) = list_checkpoints(store.directory)
        assert checkpoint.step == 2 and not damage_of(checkpoint.path)


def test_a_disk_that_fails_at_the_start_removes_nothing(store):
    interrupted(store, written=True)
    in_the_way = store.directory / ".global_step_2.writing" / "manifest.json"
    in_the_way.mkdir()
    with pytest.raises(SaveFailed, match=r"\.global_step_2\.writing is complete and could not be published: "):
        Store(store.directory)
    in_the_way.rmdir()
    with closing(Store(store.directory)):
        assert [one.step for one in list_checkpoints(store.directory)] == [2]


def test_a_save_that_failed_does_not_count_as_saved(store):
    saver = saver_of(Models(at_once=False, error="rank 1: No space left on device"), store)
    save(saver)
    saver.models = Models()
    saver.rescue(ERROR, lambda: None)
    assert state(store, 1)["stopped"] == str(ERROR)


def test_one_that_is_not_complete_is_removed(store):
    interrupted(store, written=False)
    with closing(Store(store.directory)):
        assert not list(store.directory.glob("*global_step*"))


def test_a_save_that_workers_cannot_write_leaves_nothing_and_training_continues(store, capsys):
    saver = saver_of(Models(at_once=False, error="rank 1: No space left on device"), store)
    save(saver)
    assert "rank 1: No space left on device" in str(saver.failed)
    assert not list(store.directory.glob("*global_step*"))
    saver.models = Models()
    save(saver, 2)
    assert saver.failed is None and [one.step for one in list_checkpoints(store.directory)] == [2]


# How often a recovery checkpoint is saved, and what is reported of it.


class Slow(Models):
    """Workers of whose weights a copy takes some seconds."""

    def __init__(self, seconds: float, **more: object) -> None:
        super().__init__(**more)
        self.seconds = seconds

    def start_save(self, directory: Path, contents: dict[str, list[str]]) -> None:
        time.sleep(self.seconds)
        super().start_save(directory, contents)


def due(saver: Saver, step: int) -> Save | None:
    return saver.due(step, (0.0, 0.0), last=False)


def test_recovery_checkpoints_are_saved_as_often_as_their_cost_allows(store):
    saver = saver_of(Slow(0.2), store, times(-1, recovery_seconds=None))
    saver.completed(1, {}, "")
    assert due(saver, 1) is Save.RECOVERY
    saver.start(Save.RECOVERY)
    saver.finish()
    assert due(saver, 2) is None
    saver.saved_at -= 19
    assert due(saver, 2) is None  # 100 x 0.2 s are not over yet
    saver.saved_at -= 41
    assert due(saver, 2) is Save.RECOVERY


def test_no_recovery_checkpoint_is_begun_while_one_is_written(store):
    models = Models(at_once=False)
    saver = saver_of(models, store, times(-1, recovery_seconds=None))
    saver.completed(1, {}, "")
    saver.start(Save.RECOVERY)
    saver.blocked = 0.0
    assert due(saver, 2) is None
    models.write()
    saver.finish()
    saver.blocked = saver.took = 0.0
    assert due(saver, 2) is Save.RECOVERY


def test_after_a_failed_recovery_save_the_next_one_waits(store):
    saver = saver_of(Models(at_once=False, error="rank 1: No space left on device"), store, times(-1, None, None, None))
    save(saver, 1, Save.RECOVERY)
    saver.saved_at -= 500
    assert due(saver, 2) is None
    saver.saved_at -= 101
    assert due(saver, 2) is Save.RECOVERY


def test_a_recovery_checkpoint_leaves_out_the_whole_model_which_no_run_resumes_from(store):
    exported = []

    class Exporting(Models):
        def export(self, directory: Path, name: str) -> None:
            exported.append(directory.parent.parent.name)

    saver = saver_of(Exporting(), store)
    saver.plan.contents["actor"].append("hf_model")
    for step, save in [(1, Save.RECOVERY), (2, Save.KEPT)]:
        saver.completed(step, {}, "")
        saver.start(save)
    saver.finish()
    assert exported == [".global_step_2.writing"]


def test_size_and_seconds_are_reported_of_recovery_checkpoints_now_and_then_and_of_the_last(store, capsys):
    saver = saver_of(Models(), store, times(-1, recovery_seconds=None))
    for step in (1, 2, 3):
        save(saver, step, Save.RECOVERY)
    reported = "".join(capsys.readouterr().out.split())
    assert "global_step_1:0.0MBin" in reported and "(arecoverycheckpoint)" in reported
    assert "global_step_2" not in reported and "global_step_3" not in reported
    saver.close()
    assert "global_step_3:0.0MBin" in "".join(capsys.readouterr().out.split())


# Rescue: an error ends the run.

ERROR = RuntimeError("rollout server 0 was lost 4 times")


def test_the_last_complete_step_is_saved_before_an_error_ends_the_run(store):
    part, prepared = Part(prompts=8), []
    saver = saver_of(Models(), store, times(-1), experience=part)
    saver.completed(1, {"loss": 1.0}, "")
    part.state = {"prompts": 16}  # the step that fails has drawn its prompts already
    saver.rescue(ERROR, lambda: prepared.append(True))
    saved = state(store, 1)
    assert (saved["prompts"], saved["recovery"], saved["stopped"]) == (8, True, str(ERROR)) and prepared


@pytest.mark.parametrize("reason", ["first step", "saved", "weights have changed", "switched off"])
def test_nothing_is_saved_without_a_sound_step_that_is_not_saved_yet(store, reason):
    saver = saver_of(Models(), store, times(-1, recovery_seconds=-1) if reason == "switched off" else None)
    if reason != "first step":
        saver.completed(1, {}, "")
    if reason == "saved":
        saver.start(Save.KEPT)
    saver.models.updates_begun += reason == "weights have changed"
    saver.rescue(ERROR, lambda: None)
    assert [one.step for one in list_checkpoints(store.directory)] == [1] * (reason == "saved")


def test_a_rescue_that_fails_hides_no_error(store, capsys):
    saver = saver_of(Models(), store)
    saver.completed(1, {}, "")

    def prepare() -> None:
        raise RuntimeError("rank 0 does not respond")

    saver.rescue(ERROR, prepare)
    assert "step 1 could not be saved: rank 0 does not respond" in capsys.readouterr().out


def test_a_save_whose_copies_do_not_fit_is_left_out_with_a_line_and_only_one_to_keep_has_failed(store, capsys):
    saver = saver_of(Models(), store, times(-1, recovery_seconds=None))
    saver.plan = replace(saver.plan, lack=lambda: "3.00 GiB are missing; set a=b")
    save(saver, kind=Save.RECOVERY)
    assert "step 1 is not saved, as its copies do not fit: 3.00 GiB" in " ".join(capsys.readouterr().out.split())
    assert saver.failed is due(saver, 2) is None, "it is tried again at the latest time"
    save(saver, 2)
    assert "set a=b" in str(saver.failed) and not list(store.directory.glob("*global_step*"))
    saver.due(3, (0.0, 1.0), last=True)  # after it nothing is trained
    save(saver, 3)
    assert saver.failed is None and [one.step for one in list_checkpoints(store.directory)] == [3]
