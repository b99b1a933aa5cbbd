import json
import math
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridrl.core.batch import Batch
from hybridrl.core.carried import PICTURE_DIGEST, PICTURE_START, PICTURES
from hybridrl.core.experience.trajectory import Episode, Trajectory, Turn
from hybridrl.core.pictures import Picture, PictureStore, Preview, digest_of
from hybridrl.data.prompts import Prompt
from hybridrl.required import required
from hybridrl.rewards.score import Score
from hybridrl.runs import sample_log
from hybridrl.runs.sample_log import SampleLog, TrainedFields, read_batch, replays, sample_record
from hybridrl.tracking import SampleRow
from hybridrl.tracking.records import read_records

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


@pytest.fixture
def batch(make_batch) -> Batch:
    """The rows of a step: two samples of one prompt, of two tokens and one."""
    return make_batch([2, 1], rewards=[1.0, 0.0], advantages=[0.5, 0.5, -0.25])


class Flushed(SampleLog):
    """A log whose files are written when a call returns."""

    def training_samples(self, *step: Any) -> None:
        super().training_samples(*step)
        self.flush()

    def validation_samples(self, *step: Any) -> None:
        super().validation_samples(*step)
        self.flush()


def log_of(tracker: RecordingTracker, **places: Any) -> SampleLog:
    """A log that writes nowhere and shows nothing but what is named."""
    nowhere = {"training_dir": None, "validation_dir": None, "replay_dir": Path(), "shown": 0}
    return Flushed(tracker, **nowhere | places)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_record_has_verls_keys_and_the_rest_under_episode():
    known = {"data_source": "maths", "row": 0, "position": 0, "sample": 0, "stop": "completed"}
    known |= {"prompt_tokens": 1, "sampled_tokens": 1, "observed_tokens": 0}
    right = {"input": "system: Be brief.\nuser: 2 + 2?", "output": "4 ✓", "gts": "4", "score": 1.0, "step": 7}
    assert sample_record(7, RIGHT) == right | {"acc": True, "pred": "4", "episode": known}
    faulty = {"input": "2 + 2?", "output": "five", "gts": "4", "score": None, "step": 7}
    fault = {"fault": "timeout", "detail": "no score within 60 s"}
    assert sample_record(7, FAULTY) == faulty | {"episode": known | fault}


def test_a_keyword_of_the_reward_hides_nothing_that_hybridrl_knows():
    named = sample_record(1, sample("?", "x", Score(1.0, {"reward": 2.0, "sample": "third"})))
    assert named["sample"] == "third" and named["episode"]["sample"] == 0


def test_a_training_record_has_the_mean_advantage_of_the_tokens_trained_on(batch):
    batch.response_mask = torch.tensor([True, False, True])
    batch.advantages = torch.tensor([0.5, 9.0, -0.25])
    trained = TrainedFields(batch, 6, 0, lambda ids: [])
    assert [trained["", 0, 0], trained["", 1, 0]] == [
        {"trained": True, "advantage": 0.5, "versions": [[6, 2]]},
        {"trained": True, "advantage": -0.25, "versions": [[6, 1]]},
    ]
    assert sample_record(1, RIGHT, trained)["episode"]["advantage"] == 0.5


def test_a_training_record_has_the_weight_version_and_the_weight_of_each_token(make_batch):
    batch = make_batch([4, 2], rewards=[1.0, 0.0], advantages=[0.5] * 6)
    batch.staleness = torch.tensor([2, 2, 0, 0, 0, 0], dtype=torch.int32)
    batch.importance_weights = torch.tensor([0.5, 2.0, 1.00004, 1.00006, 0.9, 1.0])
    batch.response_mask = torch.tensor([True, True, True, True, False, True])
    trained = TrainedFields(batch, 6, 0, lambda ids: [])
    first, second = trained["", 0, 0], trained["", 1, 0]
    assert (first["versions"], first["weights"]) == ([[4, 2], [6, 2]], [0.5, 2.0, 1.0, 1.0001])
    assert (second["versions"], second["weights"]) == ([[6, 2]], [0.0, 1.0]), "0: a token that was not trained on"


def test_a_step_begins_with_the_weights_of_the_step_before(tracker, tmp_path, batch):
    log = Flushed(tracker, training_dir=str(tmp_path), validation_dir=None, replay_dir=tmp_path, shown=0)
    log.training_samples(3, [RIGHT], batch)
    (right,) = rows_of(tmp_path / "3.jsonl")
    assert right["episode"]["versions"] == [[2, 2]] and "weights" not in right["episode"]


def test_a_sample_that_was_not_trained_on_says_so():
    assert sample_record(1, FAULTY, {})["episode"]["trained"] is False


def test_the_tokens_of_the_least_and_the_largest_advantage_are_written(make_batch):
    rewards, advantages = [0.0] * 5, torch.tensor([0.1, 0.1, -0.2, 0.3, 0.0, 0.05])
    batch = make_batch([2, 1, 1, 1, 1], rewards=rewards, advantages=advantages)
    batch.rollout_log_probs = torch.linspace(-1, 0, 6)
    batch.old_log_probs = batch.entropies = None
    trained = TrainedFields(batch, 6, 2, lambda ids: [f"<{one}>" for one in ids])
    written = {position: fields["tokens"] for (_, position, _), fields in trained.items() if "tokens" in fields}
    assert sorted(written) == [1, 2], "with advantages of -0.2 and 0.3"
    assert written[2] == {
        "ids": [batch.response_ids[3].item()],
        "texts": [f"<{batch.response_ids[3]}>"],
        "sampled": [1],
        "log_probs": [-0.4],
        "advantages": [0.3],
    }


def test_what_a_teacher_reads_and_gives_is_written(make_batch):
    batch = make_batch([1, 2], rewards=[0.0] * 3, advantages=torch.zeros(3))
    batch.old_log_probs = batch.entropies = None
    context = {"context_ids": torch.tensor([65, 66], dtype=torch.int32), "context_lengths": torch.tensor([0, 2])}
    batch.carried = {**batch.carried, **context, "teacher_log_probs": torch.tensor([-1.0, -2.0, -3.0])}
    first, second = TrainedFields(batch, 6, 2, lambda ids: [*map(chr, ids)]).values()
    assert "teacher_reads" not in first and second["teacher_reads"] == "AB"
    assert second["tokens"]["teacher_log_probs"] == [-2, -3]


def test_an_episode_of_two_rows_is_one_record_with_all_of_its_tokens(make_batch):
    batch = make_batch([2, 1], rewards=[1.0, 1.0], advantages=[0.5, 0.5, 0.5])
    batch.sample, batch.episode = torch.tensor([0, 0]), torch.tensor([0, 0])
    ((place, fields),) = TrainedFields(batch, 6, 4, lambda ids: ["?"] * len(ids)).items()
    assert place == ("", 0, 0) and len(fields["tokens"]["ids"]) == 3


def test_a_ground_truth_that_json_cannot_represent_is_written_as_text(tracker, tmp_path):
    log = log_of(tracker, validation_dir=str(tmp_path))
    log.validation_samples(1, [sample("?", "x", Score(0.0), ground_truth={"answers": np.array([1, 2])})])
    assert rows_of(tmp_path / "1.jsonl")[0]["gts"] == {"answers": "[1 2]"}


def test_training_and_validation_samples_go_to_their_own_directories(tracker, tmp_path, batch):
    places = {"training_dir": str(tmp_path / "train"), "validation_dir": str(tmp_path / "val")}
    log = Flushed(tracker, **places, replay_dir=tmp_path, shown=0)
    log.training_samples(3, [RIGHT], batch)
    log.validation_samples(4, [FAULTY])
    (right,) = rows_of(tmp_path / "train" / "3.jsonl")
    assert right["output"] == "4 ✓" and right["episode"]["advantage"] == 0.5
    assert rows_of(tmp_path / "val" / "4.jsonl")[0]["output"] == "five"
    assert tracker.shown == []


def test_a_step_written_again_replaces_the_earlier_file(tracker, tmp_path):
    log = log_of(tracker, validation_dir=str(tmp_path))
    log.validation_samples(1, [RIGHT, RIGHT])
    log.validation_samples(1, [FAULTY])
    assert len(rows_of(tmp_path / "1.jsonl")) == 1


def test_a_resumed_run_deletes_the_samples_of_later_steps_and_nothing_else(tracker, tmp_path, batch):
    training, validation = tmp_path / "train", tmp_path / "val"
    log = Flushed(tracker, training_dir=str(training), validation_dir=str(validation), replay_dir=tmp_path, shown=0)
    for step in (0, 2, 3, 10):
        log.training_samples(step, [RIGHT], batch)
        log.validation_samples(step, [RIGHT])
    (training / "notes.jsonl").touch()
    (training / "11.txt").touch()
    log.delete_after(2)
    assert sorted(path.name for path in training.iterdir()) == ["0.jsonl", "11.txt", "2.jsonl", "notes.jsonl"]
    assert sorted(path.name for path in validation.iterdir()) == ["0.jsonl", "2.jsonl"]


def test_a_full_disk_costs_the_samples_of_a_step_and_does_not_end_the_run(tracker, tmp_path, capsys):
    (tmp_path / ".3.jsonl.writing").symlink_to("/dev/full")
    log = log_of(tracker, validation_dir=str(tmp_path))
    log.validation_samples(3, [RIGHT])
    assert list(tmp_path.iterdir()) == [], "no partial file is left"
    (warning,) = capsys.readouterr().out.splitlines()
    cause = f"{tmp_path}/3.jsonl could not be written: No space left on device"
    assert warning == f"warning: {cause}; training continues [samples-lost]"


def test_keys_of_the_reward_replace_none_of_the_samples_own_and_it_is_said_once(tracker, tmp_path, capsys):
    extras = {"score": 1.0, "output": "MINE", "input": 5, "gts": "other", "step": 99, "episode": 3, "acc": True}
    episode = replace(RIGHT, score=Score(1.0, extras))
    log = log_of(tracker, validation_dir=str(tmp_path))
    log.validation_samples(3, [episode])
    log.validation_samples(4, [episode])
    (row,), (own,) = rows_of(tmp_path / "3.jsonl"), read_records(tmp_path / "3.jsonl")
    assert (own.response, own.truth, own.step) == (episode.text, episode.prompt.ground_truth, 3)
    assert {name: row[f"reward/{name}"] for name in ("output", "input", "gts", "step", "episode")} == {
        name: extras[name] for name in ("output", "input", "gts", "step", "episode")
    }
    assert row["acc"] is True and isinstance(row["episode"], dict)
    (warning,) = capsys.readouterr().out.splitlines()
    assert "gts as reward/gts" in warning and warning.endswith("[reward-keys]")


def test_numbers_that_json_lacks_are_null_in_samples(tracker, tmp_path):
    extras = {"score": 1.0, "nan": math.nan, "nested": [{"a": math.inf}, -math.inf, 2.5]}
    log = log_of(tracker, validation_dir=str(tmp_path))
    log.validation_samples(3, [replace(RIGHT, score=Score(1.0, extras))])

    def none(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    row = json.loads((tmp_path / "3.jsonl").read_text(), parse_constant=none)
    assert row["nan"] is None and row["nested"] == [{"a": None}, None, 2.5]


def test_without_directories_nothing_is_deleted(tracker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "9.jsonl").touch()
    log_of(tracker).delete_after(0)
    log_of(tracker, training_dir=str(tmp_path / "none yet")).delete_after(0)
    assert (tmp_path / "9.jsonl").exists()


def test_without_directories_nothing_is_written(tracker, tmp_path, monkeypatch, batch):
    monkeypatch.chdir(tmp_path)
    log = log_of(tracker, shown=1)
    log.training_samples(1, [RIGHT], batch)
    log.validation_samples(1, [RIGHT])
    assert list(tmp_path.iterdir()) == []


def test_the_first_validation_samples_are_shown(tracker):
    log = log_of(tracker, shown=2)
    log.validation_samples(5, [RIGHT, FAULTY, RIGHT])
    ((step, (right, faulty)),) = tracker.shown
    assert step == 5
    assert right == SampleRow("system: Be brief.\nuser: 2 + 2?", "4 ✓", "4", 1.0)
    assert faulty.response == "five" and math.isnan(faulty.score)


def test_the_batches_of_the_last_few_diagnoses_are_kept(tracker, tmp_path, make_batch):
    log = Flushed(tracker, training_dir=None, validation_dir=None, replay_dir=tmp_path / "replay", shown=0)
    batch = make_batch([2, 1], rewards=[0.0, 1.0])
    for step in (8, 9, 10, 11):
        log.keep(step, batch)
    assert [path.stem for path in replays(tmp_path / "replay")] == ["9", "10", "11"]
    kept, pixels = read_batch(tmp_path / "replay" / "11.npz")
    assert pixels == []
    assert required(kept.rewards).tolist() == [0.0, 1.0] and kept.response_ids.tolist() == batch.response_ids.tolist()
    assert kept.values is None


def test_three_samples_of_different_prompts_are_shown(capsys):
    rows = [sample(f"prompt {row // 2}", f"response {row}", Score(1.0)) for row in range(12)]
    SampleLog.show(7, rows)
    shown = capsys.readouterr().out
    assert "samples of step 7" in shown
    assert [f"response {row} " in shown for row in range(12)] == [row in (0, 4, 8) for row in range(12)]


def test_the_samples_of_the_oldest_steps_are_deleted_beyond_the_bound(tracker, batch, tmp_path):
    def log(most: float | None) -> SampleLog:
        return log_of(tracker, training_dir=str(tmp_path / "t"), most=most)

    log(None).training_samples(8, [RIGHT], batch)
    (tmp_path / "t" / "notes.jsonl").write_text("of the user")
    size = (tmp_path / "t" / "8.jsonl").stat().st_size
    for step in (9, 10, 11):
        log(2.5 * size + 2).training_samples(step, [RIGHT], batch)
    assert {path.name for path in (tmp_path / "t").iterdir()} == {"notes.jsonl", "10.jsonl", "11.jsonl"}
    log(1).training_samples(12, [RIGHT], batch)
    assert {path.name for path in (tmp_path / "t").iterdir()} == {"notes.jsonl", "12.jsonl"}, "the newest stays"


def seeing(*digests: int, jpeg: bytes = b"jpeg") -> Episode:
    """A sample whose prompt has pictures of 64 x 48 pixels."""
    pictures = tuple(Picture(digest, 6, None, Preview(64, 48, jpeg)) for digest in digests)
    return replace(RIGHT, prompt=replace(RIGHT.prompt, pictures=pictures))


def test_a_record_names_the_pictures_of_its_prompt_by_the_16_digits_of_their_digests():
    tool = Picture(10, 6, None)
    episode = replace(RIGHT, prompt=replace(RIGHT.prompt, pictures=(*seeing(-1).prompt.pictures, tool)))
    assert sample_record(7, episode)["episode"]["images"] == [
        {"digest": "f" * 16, "width": 64, "height": 48, "file": f"pictures/{'f' * 16}.jpg"},
        {"digest": "000000000000000a", "width": None, "height": None, "file": None},
    ]


def test_a_picture_is_written_once_and_deleted_with_the_last_samples_that_have_it(tracker, batch, tmp_path):
    def log(most: float | None, *digests: int, step: int, jpeg: bytes = b"jpeg") -> None:
        """Write a step; ten seconds lie between it and the next one."""
        sample = seeing(*digests, jpeg=jpeg)
        log_of(tracker, training_dir=str(tmp_path), most=most).training_samples(step, [sample], batch)
        for path in tmp_path.rglob("*.*"):
            written = path.stat().st_mtime - 10 + (path.name == f"{step}.jsonl")
            os.utime(path, (written, written))

    log(None, 1, 2, step=8)
    (tmp_path / "pictures" / "holiday.jpg").write_bytes(b"of the user")
    log(None, 2, 3, step=9, jpeg=b"another")
    assert (tmp_path / "pictures" / f"{2:016x}.jpg").read_bytes() == b"jpeg"
    log(2.5 * (tmp_path / "9.jsonl").stat().st_size, 3, 4, step=10)
    assert {path.name for path in tmp_path.glob("*.jsonl")} == {"9.jsonl", "10.jsonl"}
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert names == {"holiday.jpg", *(f"{digest:016x}.jpg" for digest in (2, 3, 4))}


def test_a_batch_is_kept_with_the_pixels_of_its_pictures_or_the_reason_is_said(
    tracker, make_batch, tmp_path, monkeypatch, capsys
):
    """Of three pictures, of 600 bytes each, the batch has two, one of them twice."""
    stored = []
    store = PictureStore(lambda pixels: stored.append(pixels) or len(stored))
    first, second, other = (store.add({"pixel_values": np.full((20, 30), number, np.uint8)}, 1) for number in range(3))
    log = log_of(tracker, replay_dir=tmp_path, fetch=lambda numbers: [stored[number - 1] for number in numbers])
    digests = {PICTURE_DIGEST: torch.tensor([first.digest, second.digest, first.digest])}
    batch = make_batch([2, 1], rewards=[0.0, 1.0])
    batch.carried = {PICTURES: torch.tensor([2, 1]), PICTURE_START: torch.zeros(3, dtype=torch.int32)} | digests
    log.last = batch, [replace(RIGHT, prompt=replace(RIGHT.prompt, pictures=(first, second, other, first)))]
    monkeypatch.setattr(sample_log, "MOST_PIXELS", 1200)
    log.record_diagnosis(4, show=False)
    kept, pixels = read_batch(tmp_path / "4.npz")
    assert kept.carried[PICTURE_DIGEST].tolist() == [first.digest, second.digest, first.digest]
    assert {*map(digest_of, pixels)} == {first.digest, second.digest} and len(pixels) == 2
    monkeypatch.setattr(sample_log, "MOST_PIXELS", 1199)
    log.record_diagnosis(5, show=False)
    assert replays(tmp_path) == [tmp_path / "4.npz"]
    assert (
        "the batch of step 5 is not kept for doctor replay: its pictures have 0 MiB of pixels"
        in capsys.readouterr().out
    )


def test_forgotten_samples_keep_no_pixels(tracker, batch):
    store, log = PictureStore(), log_of(tracker)
    digest = (picture := store.add({"pixel_values": np.zeros(1)}, 1)).digest
    log.training_samples(1, [replace(RIGHT, prompt=replace(RIGHT.prompt, pictures=(picture,)))], batch)
    del picture
    assert digest in store.handles([digest])
    log.forget()
    with pytest.raises(KeyError):
        store.handles([digest])


def test_a_thread_writes_the_files_and_flush_waits_for_them(tracker, tmp_path, batch):
    ready, places = threading.Event(), {"training_dir": str(tmp_path), "validation_dir": None, "replay_dir": tmp_path}

    def transcript(_: Trajectory) -> dict[str, Any]:
        assert ready.wait(10)
        return {}

    log = SampleLog(tracker, **places, shown=0, transcript=transcript)
    log.training_samples(1, [RIGHT], batch)
    assert not (tmp_path / "1.jsonl").exists()
    ready.set()
    log.flush()
    assert len(rows_of(tmp_path / "1.jsonl")) == 1


def test_what_fails_while_samples_are_written_is_raised_before_the_next_ones(tracker, tmp_path, batch):
    places = {"training_dir": str(tmp_path), "validation_dir": None, "replay_dir": tmp_path}
    log = SampleLog(tracker, **places, shown=0, transcript=lambda _: 1 / 0)
    log.training_samples(1, [RIGHT], batch)
    with pytest.raises(ZeroDivisionError):
        log.training_samples(2, [RIGHT], batch)
    assert not [*tmp_path.iterdir()]


def test_an_episode_that_is_not_in_the_batch_was_not_trained_on(make_batch):
    batch = make_batch([2, 1], rewards=[1.0, 0.0], advantages=[0.5, 0.5, -0.25])
    batch.position, batch.sample = torch.tensor([7, 3]), torch.tensor([1, 0])
    trained = TrainedFields(batch, 6, 0, lambda ids: [])
    assert [*trained] == [("", 7, 1), ("", 3, 0)] and trained["", 3, 0]["advantage"] == -0.25
    assert [key in trained for key in (("", 7, 0), ("", 3, 1), ("", 9, 0), ("validation", 7, 1))] == [False] * 4


def test_pictures_that_cannot_be_written_cost_no_step(tracker, batch, tmp_path, capsys):
    (tmp_path / "pictures").write_text("a file in the place of the directory")
    log_of(tracker, training_dir=str(tmp_path)).training_samples(3, [seeing(1)], batch)
    assert "3.jsonl could not be written" in capsys.readouterr().out
