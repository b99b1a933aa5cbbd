"""When a step is saved, and what its state.json has."""

import json
from pathlib import Path

import pytest

from hybridrl.checkpoint.saver import Save, SavePlan, Saver, SaveTimes
from hybridrl.checkpoint.store import Store
from hybridrl.tracking import Tracker


def times(steps=0, epochs=None, seconds=None, recovery_seconds=600.0) -> SaveTimes:
    return SaveTimes(steps, epochs, seconds, recovery_seconds)


def kept(chosen: SaveTimes, steps: int, prompts_per_step: int = 3, rows: int = 8) -> list[int]:
    """The steps that are kept, of a run in which no time passes."""
    epochs = [step * prompts_per_step / rows for step in range(steps + 1)]
    return [step for step in range(1, steps + 1) if chosen.keeps(step, (epochs[step - 1], epochs[step]), 0.0)]


def test_every_so_many_steps():
    assert kept(times(steps=4), 10) == [4, 8]


def test_each_step_in_which_an_epoch_is_done_whatever_the_batch_size():
    # 3 prompts a step of 8 rows: prompts 8, 16 and 24 are drawn in steps 3, 6 and 8
    assert kept(times(epochs=1), 10) == [3, 6, 8]


def test_parts_of_an_epoch_and_several_epochs():
    assert kept(times(epochs=0.5), 6) == [2, 3, 4, 6]
    assert kept(times(epochs=2), 10) == [6]


def test_more_than_an_epoch_in_a_step_is_saved_once():
    assert kept(times(epochs=1), 3, prompts_per_step=20) == [1, 2, 3]


def test_after_so_many_seconds():
    assert times(seconds=60).keeps(7, (0.1, 0.2), seconds=60.0)
    assert not times(seconds=60).keeps(7, (0.1, 0.2), seconds=59.9)


def test_steps_epochs_and_seconds_add_up():
    both = times(steps=5, epochs=1)
    assert kept(both, 10) == [3, 5, 6, 8, 10]


@pytest.mark.parametrize(("chosen", "ever"), [(times(-1), False), (times(-1, epochs=1), True), (times(0), True)])
def test_nothing_is_ever_saved_where_steps_are_switched_off_and_neither_epochs_nor_seconds_are_named(chosen, ever):
    assert chosen.ever is ever
    assert chosen.recovers(10_000.0) is ever


def test_a_recovery_save_is_due_after_its_seconds_and_never_where_they_are_switched_off():
    assert times(recovery_seconds=600).recovers(600.0)
    assert not times(recovery_seconds=600).recovers(599.0)
    assert not times(recovery_seconds=-1).recovers(10_000.0)


class Part:
    """A part of a run with this state."""

    def __init__(self, **state: object) -> None:
        self.state = state

    def state_dict(self) -> dict[str, object]:
        return self.state


class Models:
    """Training workers that have written everything at once."""

    def start_save(self, directory: Path, contents: dict[str, list[str]]) -> None: ...

    def finished_save(self) -> bool:
        return True


def test_the_state_of_every_part_lies_in_state_json_with_what_identifies_the_run(tmp_path):
    store = Store(tmp_path / "run")
    plan = SavePlan({"actor": ["model"]}, times(1), lambda directory: None, "", {"data": "d", "fingerprint": "f"})
    with Tracker([], tmp_path / "log", "project", "run", {}, 1) as tracker:
        parts = {"experience": Part(prompts=8, fault_steps=0), "algorithm": Part(kl_weight=0.5), "tracker": tracker}
        saver = Saver(Models(), store, plan, parts)
        saver.start(3, Save.RECOVERY, {"val/loss": 1.0}, "an update was not finite")
        saver.finish()
    store.close()
    state = json.loads((tmp_path / "run" / "global_step_3" / "state.json").read_text())
    del state["published"]
    assert state == {
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
    }
