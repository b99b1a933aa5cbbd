import gzip
import json
from pathlib import Path

import pytest

from hybridrl.tracking.records import LEVEL, SampleRecord, read_records, record_files, write_records

VERL = {"input": "user: 2 + 2?", "output": "4", "gts": "4", "score": 1.0, "step": 7, "acc": True}


def test_a_record_is_read_as_it_was_written(tmp_path):
    write_records(tmp_path / "new" / "7.jsonl", [VERL | {"episode": {"row": 3}}])
    (record,) = read_records(tmp_path / "new" / "7.jsonl")
    assert record == SampleRecord("user: 2 + 2?", "4", "4", 1.0, 7, {"acc": True}, {"row": 3})


def test_files_of_verl_have_no_episode(tmp_path):
    (tmp_path / "7.jsonl").write_text(json.dumps(VERL))
    (record,) = read_records(tmp_path / "7.jsonl")
    assert record.episode == {} and record.components == {"acc": True}


@pytest.mark.parametrize("text", ["</script>", "\x00\x1b[31m", "\ud800 alone", "\u202eright to left", "\u2028"])
def test_whatever_a_model_writes_is_one_line_of_text(tmp_path, text):
    write_records(tmp_path / "1.jsonl", [VERL | {"output": text}, VERL])
    first, second = read_records(tmp_path / "1.jsonl")
    assert second.response == "4" and isinstance(first.response, str)


def test_lines_that_are_torn_or_no_samples_are_skipped_with_one_warning(tmp_path, capsys):
    lines = [json.dumps(VERL), "[1, 2]", '{"other": 1}', json.dumps(VERL)[:-9]]
    (tmp_path / "1.jsonl").write_text("\n".join(lines))
    assert len(list(read_records(tmp_path / "1.jsonl"))) == 1
    assert capsys.readouterr().out.count("3 lines cannot be read") == 1


def test_the_files_of_a_directory_are_by_step_in_order(tmp_path):
    for name in ("10.jsonl", "2.jsonl", "notes.jsonl", ".3.jsonl.writing"):
        (tmp_path / name).touch()
    assert list(record_files(tmp_path)) == [2, 10] and record_files(tmp_path / "none") == {}


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path):
    (tmp_path / ".1.jsonl.writing").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space"):
        write_records(Path(tmp_path / "1.jsonl"), [VERL])
    assert list(tmp_path.iterdir()) == []


def test_the_samples_of_a_large_step_are_compressed_and_read_alike(tmp_path):
    path, many = tmp_path / "7.jsonl", [VERL | {"output": f"{number} " + "word " * 200} for number in range(1200)]
    write_records(path, [VERL])
    write_records(path, many)
    (file,) = tmp_path.iterdir()
    assert record_files(tmp_path) == {7: file} and file.name == "7.jsonl.gz"
    assert file.stat().st_size < sum(len(one["output"]) for one in many) / 3
    assert [one.response for one in read_records(file)] == [one["output"] for one in many]
    assert file.read_bytes() == gzip.compress(gzip.decompress(file.read_bytes()), LEVEL, mtime=0), "as in one call"
    write_records(path, [VERL])
    assert list(tmp_path.iterdir()) == [path], "a step that is trained again"


def test_what_is_left_of_a_compressed_file_that_was_cut_short_is_read(tmp_path, capsys):
    file = tmp_path / "7.jsonl.gz"
    file.write_bytes(
        gzip.compress(b"".join(json.dumps(VERL | {"gts": n}).encode() + b"\n" for n in range(5000)))[:-100]
    )
    assert 0 < len(list(read_records(file))) < 5000
    file.write_bytes(b"no gzip file")
    assert list(read_records(file)) == []
    assert "cannot be read as a sample" in capsys.readouterr().out


IMAGE = {"digest": "f" * 16, "width": 64, "height": 48, "file": f"pictures/{'f' * 16}.jpg"}


@pytest.mark.parametrize(
    ("images", "kept"),
    [
        ([IMAGE, {"digest": "a", "width": None, "height": None, "file": None}], True),
        ([IMAGE | {"file": "pictures/../../secret.jpg"}], False),
        ([IMAGE | {"file": f"{IMAGE['file']}\n"}], False),
        ([IMAGE | {"file": "/etc/passwd"}], False),
        ([IMAGE | {"file": 7}], False),
        ([IMAGE | {"width": "wide"}], False),
        ([IMAGE | {"file": None}], False),
        (["text"], False),
        (IMAGE, False),
    ],
)
def test_no_other_file_than_a_picture_next_to_it_is_read_for_a_sample(tmp_path, images, kept):
    write_records(tmp_path / "1.jsonl", [VERL | {"episode": {"row": 3, "images": images}}])
    (record,) = read_records(tmp_path / "1.jsonl")
    assert record.episode == {"row": 3} | ({"images": images} if kept else {}) and record.folder == tmp_path
