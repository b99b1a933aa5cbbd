"""Samples on disk: found again by their keys, torn lines removed, one writer at a time; and how far they are."""

import json
import time

import pytest

from hybridrl.config import ConfigError
from hybridrl.evaluation.samples import EvaluationProgress, Sample, SampleFile, read_samples


def sample(key: str, score: float | None = 1.0, **more: object) -> Sample:
    fields = {"dataset": "maths", "id": key, "sample": 0, "seed": 1, "prompt": "2+2?", "response": "4", "truth": "4"}
    return Sample(**fields | {"tokens": 1, "finish": "completed", "score": score, "key": key, "reward": "r"} | more)


def test_samples_are_there_as_soon_as_they_are_appended(tmp_path):
    with SampleFile(tmp_path / "samples.jsonl") as file:
        file.append(sample("a"))
        assert json.loads((tmp_path / "samples.jsonl").read_text())["key"] == "a"


def test_a_resumed_file_has_the_samples_of_the_earlier_one(tmp_path):
    with SampleFile(tmp_path / "samples.jsonl") as file:
        file.append(sample("a", extras={"acc": True, "pred": "4"}, pred="4"))
    with SampleFile(tmp_path / "samples.jsonl") as file:
        assert file.samples == {"a": sample("a", extras={"acc": True, "pred": "4"}, pred="4")}
        assert file.has("a") and not file.has("b")


@pytest.mark.parametrize("torn", [b'{"dataset": "ma', b'{"dataset": "maths"}', b"\xff\xfe"])
def test_a_last_line_that_a_kill_cut_off_is_removed(tmp_path, torn):
    path = tmp_path / "samples.jsonl"
    with SampleFile(path) as file:
        file.append(sample("a"))
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    with SampleFile(path) as file:
        assert list(file.samples) == ["a"]
        file.append(sample("b"))
    assert path.read_bytes().startswith(whole) and [one.key for one in read_samples(path)] == ["a", "b"]


def test_a_line_in_the_middle_that_is_no_sample_is_left_out_with_a_warning(tmp_path, capsys):
    path = tmp_path / "samples.jsonl"
    with SampleFile(path) as file:
        file.append(sample("a"))
    path.write_bytes(b"[1, 2]\nno json\n" + path.read_bytes())
    assert [one.key for one in read_samples(path)] == ["a"]
    assert "2 lines cannot be read" in capsys.readouterr().out


def test_a_later_line_replaces_the_earlier_one_and_the_file_has_each_sample_once_at_the_end(tmp_path):
    path = tmp_path / "samples.jsonl"
    with SampleFile(path) as file:
        file.append(sample("a", 0.0))
        file.append(sample("b"))
        file.append(sample("a", 1.0))
    assert [(one.key, one.score) for one in read_samples(path)] == [("a", 1.0), ("b", 1.0)]
    assert len(path.read_text().splitlines()) == 2


def test_without_resume_the_earlier_file_is_renamed_once_there_is_a_new_sample(tmp_path):
    for number in range(3):
        with SampleFile(tmp_path / "samples.jsonl", resume=False):
            pass  # what is rejected before the first sample changes nothing
        with SampleFile(tmp_path / "samples.jsonl", resume=False) as file:
            assert not file.samples
            file.append(sample(str(number)))
    names = ("samples.previous-1.jsonl", "samples.previous-2.jsonl", "samples.jsonl")
    assert [[one.key for one in read_samples(tmp_path / name)] for name in names] == [["0"], ["1"], ["2"]]


@pytest.mark.parametrize("resume", [True, False])
def test_a_second_writer_is_rejected_also_of_a_file_that_replaces_a_renamed_one(tmp_path, resume):
    with SampleFile(tmp_path / "samples.jsonl") as file:
        file.append(sample("a"))
    with SampleFile(tmp_path / "samples.jsonl", resume=resume) as file:
        file.append(sample("a"))
        with pytest.raises(ConfigError, match="another evaluation"):
            SampleFile(tmp_path / "samples.jsonl")


def test_a_response_lost_by_a_fault_is_sampled_again_and_one_whose_grader_failed_is_only_scored_again(tmp_path):
    with SampleFile(tmp_path / "samples.jsonl") as file:
        file.append(sample("lost", None, response="", tokens=0, fault="raised:Timeout"))
        file.append(sample("unscored", None, fault="timeout"))
        file.append(sample("good"))
        assert [file.has(key) for key in ("lost", "unscored", "good")] == [False, True, True]
        assert file.is_stale("unscored", "r") and not file.is_stale("good", "r") and file.is_stale("good", "other")


@pytest.mark.parametrize(
    ("extras", "value"), [({}, 0.25), ({"acc": True}, 1.0), ({"acc": 0}, 0.0), ({"acc": "yes"}, 0.25)]
)
def test_what_counts_is_acc_where_the_reward_gives_a_number(extras, value):
    assert sample("a", 0.25, extras=extras).value == value


def test_hostile_texts_are_kept(tmp_path):
    text = 'line\nbreak \u2028 "quote" \x00 \u202e </script>'
    with SampleFile(tmp_path / "samples.jsonl") as file:
        file.append(sample("a", response=text))
        file.append(sample("b", response="half \ud83d of a character"))
    first, second = read_samples(tmp_path / "samples.jsonl")
    assert first.response == text and second.key == "b"


def test_a_log_gets_a_line_now_and_then_also_before_the_first_sample(capsys):
    with EvaluationProgress(4, log_seconds=0.1) as shown:
        time.sleep(0.25)
        for score in (1.0, 0.0, None):
            shown(sample("a", score, tokens=50))
        time.sleep(0.25)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "0/4 samples"
    assert lines[-1].startswith("3/4 samples, ") and lines[-1].endswith("left, mean so far 0.500")
    time.sleep(0.15)
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_a_bar(terminal, capsys):
    with EvaluationProgress(2) as shown:
        shown(sample("a"))
    assert shown.bar is not None and shown.bar.tasks[0].completed == 1
