import json
import math
from pathlib import Path

import numpy as np
import pytest

from hybridrl.data.prompts import Prompt
from hybridrl.environments.episode import Trajectory, Turn
from hybridrl.experience.episodes import Episode
from hybridrl.experience.sample_log import SampleLog, dump_samples, read_batch, replays
from hybridrl.rewards.score import Score
from hybridrl.tracking import SampleRow

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]


def sample(messages, text: str, score: Score, ground_truth: object = "4") -> Episode:
    turn = Turn([1], np.array([1]), np.array([0.0]), 0, "stop")
    return Episode(Prompt(0, [1], messages, "maths", ground_truth, {}), 0, 0, Trajectory([turn]), text, score)


RIGHT = sample(CHAT, "4 ✓", Score(1.0, {"score": True, "acc": True, "pred": "4"}))
FAULTY = sample("2 + 2?", "five", Score(None, fault="timeout", detail="no score within 60 s"))


class RecordingTracker:
    """A tracker that records its tables."""

    def __init__(self) -> None:
        self.shown = []

    def samples(self, step, rows):
        self.shown.append((step, rows))


@pytest.fixture
def tracker() -> RecordingTracker:
    return RecordingTracker()


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_sample_is_dumped_as_one_object_with_verls_keys(tmp_path):
    path = tmp_path / "new" / "7.jsonl"
    dump_samples(path, 7, [RIGHT, FAULTY])
    assert rows_of(path) == [
        {
            "input": "system: Be brief.\nuser: 2 + 2?",
            "output": "4 ✓",
            "gts": "4",
            "score": 1.0,
            "step": 7,
            "acc": True,
            "pred": "4",
        },
        {"input": "2 + 2?", "output": "five", "gts": "4", "score": None, "step": 7, "fault": "timeout"},
    ]
    text = path.read_text(encoding="utf-8")
    assert "✓" in text
    assert '"score": 1.0' in text


def test_a_ground_truth_that_json_cannot_represent_is_dumped_as_text(tmp_path):
    path = tmp_path / "1.jsonl"
    dump_samples(path, 1, [sample("?", "x", Score(0.0), ground_truth={"answers": np.array([1, 2])})])
    assert rows_of(path)[0]["gts"] == {"answers": "[1 2]"}


def test_a_step_dumped_again_replaces_the_earlier_dump(tmp_path):
    path = tmp_path / "1.jsonl"
    dump_samples(path, 1, [RIGHT, RIGHT])
    dump_samples(path, 1, [FAULTY])
    assert len(rows_of(path)) == 1


def test_training_and_validation_samples_go_to_their_own_directories(tracker, tmp_path):
    places = {"training_dir": str(tmp_path / "train"), "validation_dir": str(tmp_path / "val")}
    log = SampleLog(tracker, **places, replay_dir=tmp_path, shown=0)
    log.training_samples(3, [RIGHT])
    log.validation_samples(4, [FAULTY])
    assert rows_of(tmp_path / "train" / "3.jsonl")[0]["output"] == "4 ✓"
    assert rows_of(tmp_path / "val" / "4.jsonl")[0]["output"] == "five"
    assert tracker.shown == []


def test_a_resumed_run_deletes_the_samples_of_later_steps_and_nothing_else(tracker, tmp_path):
    training, validation = tmp_path / "train", tmp_path / "val"
    log = SampleLog(tracker, training_dir=str(training), validation_dir=str(validation), replay_dir=tmp_path, shown=0)
    for step in (0, 2, 3, 10):
        log.training_samples(step, [RIGHT])
        log.validation_samples(step, [RIGHT])
    (training / "notes.jsonl").touch()
    (training / "11.txt").touch()
    log.delete_after(2)
    assert sorted(path.name for path in training.iterdir()) == ["0.jsonl", "11.txt", "2.jsonl", "notes.jsonl"]
    assert sorted(path.name for path in validation.iterdir()) == ["0.jsonl", "2.jsonl"]


def test_a_full_disk_costs_the_samples_of_a_step_and_does_not_end_the_run(tracker, tmp_path, capsys):
    (tmp_path / "3.jsonl").symlink_to("/dev/full")
    SampleLog(tracker, training_dir=str(tmp_path), validation_dir=None, replay_dir=Path(), shown=0).training_samples(
        3, [RIGHT]
    )
    assert list(tmp_path.iterdir()) == [], "no partial file is left"
    (warning,) = capsys.readouterr().out.splitlines()
    cause = f"{tmp_path}/3.jsonl could not be written: No space left on device"
    assert warning == f"warning: {cause}; training continues [samples-lost]"


def test_without_directories_nothing_is_deleted(tracker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "9.jsonl").touch()
    SampleLog(tracker, training_dir=None, validation_dir=None, replay_dir=Path(), shown=0).delete_after(0)
    SampleLog(
        tracker, training_dir=str(tmp_path / "none yet"), validation_dir=None, replay_dir=Path(), shown=0
    ).delete_after(0)
    assert (tmp_path / "9.jsonl").exists()


def test_without_directories_nothing_is_written(tracker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = SampleLog(tracker, training_dir=None, validation_dir=None, replay_dir=Path(), shown=1)
    log.training_samples(1, [RIGHT])
    log.validation_samples(1, [RIGHT])
    assert list(tmp_path.iterdir()) == []


def test_the_first_validation_samples_are_shown(tracker):
    log = SampleLog(tracker, training_dir=None, validation_dir=None, replay_dir=Path(), shown=2)
    log.validation_samples(5, [RIGHT, FAULTY, RIGHT])
    ((step, (right, faulty)),) = tracker.shown
    assert step == 5
    assert right == SampleRow("system: Be brief.\nuser: 2 + 2?", "4 ✓", "4", 1.0)
    assert faulty.response == "five" and math.isnan(faulty.score)


def test_the_batches_of_the_last_few_diagnoses_are_kept(tracker, tmp_path, make_batch):
    log = SampleLog(tracker, training_dir=None, validation_dir=None, replay_dir=tmp_path / "replay", shown=0)
    batch = make_batch([2, 1], rewards=[0.0, 1.0])
    for step in (8, 9, 10, 11):
        log.keep(step, batch)
    assert [path.stem for path in replays(tmp_path / "replay")] == ["9", "10", "11"]
    kept = read_batch(tmp_path / "replay" / "11.npz")
    assert kept.rewards.tolist() == [0.0, 1.0] and kept.response_ids.tolist() == batch.response_ids.tolist()
    assert kept.values is None


def test_three_samples_of_different_prompts_are_shown(capsys):
    rows = [sample(f"prompt {row // 2}", f"response {row}", Score(1.0)) for row in range(12)]
    SampleLog.show(7, rows)
    shown = capsys.readouterr().out
    assert "samples of step 7" in shown
    assert [f"response {row} " in shown for row in range(12)] == [row in (0, 4, 8) for row in range(12)]
