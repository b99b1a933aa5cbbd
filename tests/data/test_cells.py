"""Rows of files with a header line and of text files: every value as it was written, every fault by row and column."""

import gzip
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Tokenizer

from hybridrl.config.findings import ConfigError
from hybridrl.config.schema import DataConfig, SFTDataConfig
from hybridrl.data.conversations import load_conversations
from hybridrl.data.prompts import Prompt, load_prompts
from hybridrl.data.rows import Faults, load_rows

from .conftest import OPTIONS

KEYS = {"prompt_key": "question", "ground_truth_key": "answer"}


def rows(file: Path) -> list[tuple[str, dict[str, Any]]]:
    faults = Faults("data.train_files")
    loaded = load_rows([str(file)], faults, key="data.train_files", max_samples=-1, shuffle=False, seed=0)
    faults.close()
    return [(row.place.removeprefix(f"{file}, "), row.values) for row in loaded]


@pytest.fixture
def load(config: DataConfig, tokenizer: Qwen2Tokenizer) -> Callable[..., list[Prompt]]:
    def run(file: Path, *, needs_truth: bool = True, **keys: Any) -> list[Prompt]:
        return list(load_prompts([str(file)], replace(config, **keys), tokenizer, **OPTIONS, needs_truth=needs_truth))

    return run


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["unix", "windows", "mac"])
@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.csv", ";"), ("a.CSV", "\t"), ("a.tsv", "\t")])
def test_every_value_is_the_text_of_its_cell(tmp_path: Path, name: str, delimiter: str, end: str, mark: str) -> None:
    lines = (["question", " answer"], ['"1, 2; 3\t4 ""é"""', "007"], [], ["true", ""])
    text = mark + "".join(delimiter.join(line) + end for line in lines)
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    first, second = {"question": '1, 2; 3\t4 "é"', "answer": "007"}, {"question": "true", "answer": ""}
    assert rows(tmp_path / name) == [("row 2", first), ("row 4", second)]


@pytest.mark.parametrize("name", ["a.csv.gz", "a.TSV.GZ", "a.csv.gz?download=true"])
def test_a_compressed_file_is_read_and_its_faults_have_row_and_column(tmp_path: Path, name: str) -> None:
    table = "question,answer\n1,\u00e9\n".encode("utf-8-sig").replace(b",", b"\t" if "TSV" in name else b",")
    (tmp_path / name).write_bytes(gzip.compress(table))
    assert rows(tmp_path / name) == [("row 2", {"question": "1", "answer": "\u00e9"})]
    (tmp_path / name).write_bytes(gzip.compress(table + b"3\n"))
    with pytest.raises(ConfigError, match=rf"{re.escape(name)}, row 3: 1 cell for 2 columns: there is none for answer"):
        rows(tmp_path / name)


def test_a_compressed_file_of_prompts_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\n\ntwo\n"))
    assert [(place, values["prompt"]) for place, values in rows(tmp_path / "a.txt.gz")] == [
        ("line 1", "one"),
        ("line 3", "two"),
    ]


@pytest.mark.parametrize("name", ["a.csv.gz", "a.txt.gz", "a.jsonl.gz"])
def test_a_damaged_compressed_file_is_rejected_by_name(tmp_path: Path, name: str) -> None:
    data = bytearray(gzip.compress(bytes(range(32, 127)) * 1000))
    data[12:40] = bytes(28)
    for content in (b"a,b\n1,2\n", bytes(data)):  # not compressed, or damaged
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=rf"{name}: not a readable .gz file .*; write it again"):
            rows(tmp_path / name)


def test_a_cell_may_have_several_lines_and_be_long_and_a_column_without_a_name_is_left_out(tmp_path: Path) -> None:
    long = "x" * 200_000
    (tmp_path / "a.csv").write_text(f',a\n0,"one\n\ntwo"\n1,{long}\n')
    assert rows(tmp_path / "a.csv") == [("row 2", {"a": "one\n\ntwo"}), ("row 3 (line 5)", {"a": long})]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "a.csv: the file is empty; give it a header line"),
        (b"\n\n", "a.csv: the file is empty"),
        (b"a;b\n", r"a.csv: there is only a header line, a, b \(delimiter: semicolon\)"),
        (b"a,b,a\n1,2,3\n", "a.csv, row 1: two columns are named a"),
        (b'"a,b\n1,2\n', "a.csv, row 1: a double quote that opens a cell is not closed"),
        ("a,b\n1,2\n".encode("utf-16"), r"a.csv, row 1: not UTF-8 \(byte 0xff\): save the file as UTF-8"),
        (b"a,b\n1,2\n3\n", "a.csv, row 3: 1 cell for 2 columns: there is none for b"),
        (b"a,b\n1,2,3\n", r"a.csv, row 2: 3 cells for 2 columns \(a, b\): put a text with the delimiter, comma, bet"),
        (b"a,b\n1,caf\xe9\n", r"a.csv, row 2: the column b is not UTF-8 \(byte 0xe9\)"),
        (b'a,b\n1,2\n3,"4\n5,6\n', "a.csv, row 3: a double quote that opens a cell is not closed"),
        (b'a,b\n1,"2"x\n', "a.csv, row 2: a double quote that opens a cell is not closed, or text follows the clos"),
        (b"version https://git-lfs.github.com/spec/v1\nsize 1\n", "a.csv is a Git LFS pointer.*git lfs pull"),
    ],
)
def test_a_bad_file_is_rejected_by_row_and_column(tmp_path: Path, content: bytes, fault: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=fault):
        rows(tmp_path / "a.csv")


def test_all_bad_rows_of_a_file_are_reported_with_its_columns_and_delimiter(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('a;b\n1\n"x\ny";2\n3;4;5\n6\n')
    with pytest.raises(ConfigError) as error:
        rows(tmp_path / "a.csv")
    head, *lines = str(error.value).split(f"\n  {tmp_path / 'a.csv'}")
    assert head == "data.train_files: 3 bad rows"
    assert lines == [
        ", row 2: 1 cell for 2 columns: there is none for b (and 1 more row)",
        ", row 4 (line 5): 3 cells for 2 columns (a, b): "
        "put a text with the delimiter, semicolon, between double quotes",
        ": the columns of its header line are a, b (delimiter: semicolon)",
    ]


def test_a_missing_column_is_named_with_those_of_the_header_and_the_delimiter(tmp_path: Path, load: Any) -> None:
    (tmp_path / "a.csv").write_text("question|answer\n1|2\n")
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "a.csv", **KEYS)
    assert "a.csv, row 2: no prompt: data.prompt_key=question must hold" in str(error.value)
    assert "data.ground_truth_key=answer is not a column: the row has question|answer" in str(error.value)
    assert "a.csv: the columns of its header line are question|answer (delimiter: comma)" in str(error.value)


def test_prompts_of_cells_have_text_truths_and_an_empty_cell_of_an_optional_column_is_no_value(
    tmp_path: Path, load: Any
) -> None:
    header = "question,answer,data_source,extra_info,tools,enable_thinking,agent_name,images\n"
    (tmp_path / "a.csv").write_text(header + 'Why?,007,gsm8k,"{""index"": 3}",,,,\nHow?,,,,,,,\n')
    first, second = load(tmp_path / "a.csv", **KEYS)
    assert (first.messages, first.ground_truth, first.data_source) == ("Why?", "007", "gsm8k")
    assert (second.ground_truth, second.data_source, second.extra_info, second.tools) == ("", "unknown", {}, [])
    assert first.extra_info == {"index": 3}


def test_an_empty_prompt_is_rejected_as_empty(tmp_path: Path, load: Any) -> None:
    (tmp_path / "a.csv").write_text("question,answer\nWhy?,1\n,2\n")
    with pytest.raises(ConfigError, match=r"row 3: no prompt: data.prompt_key=question .*; it is empty"):
        load(tmp_path / "a.csv", **KEYS)


def test_cells_are_prompts_and_responses_for_supervised_fine_tuning(
    tmp_path: Path, sft_config: SFTDataConfig, tokenizer: Qwen2Tokenizer
) -> None:
    (tmp_path / "a.csv").write_text('prompt,response,messages\nWhy?,"Be\ncause",\n')
    (made,) = load_conversations([str(tmp_path / "a.csv")], sft_config, tokenizer, **OPTIONS)
    trained = [token for token, mask in zip(made.ids, made.loss_mask, strict=True) if mask]
    assert tokenizer.decode(trained) == "Be\ncause<|im_end|>"


def test_a_text_file_has_a_prompt_per_line(tmp_path: Path, load: Any) -> None:
    (tmp_path / "a.txt").write_text("\ufeffTell me\n\n  \n  a joke\r\n", encoding="utf-8", newline="")
    prompts = load(tmp_path / "a.txt", needs_truth=False)
    assert [(prompt.messages, prompt.ground_truth) for prompt in prompts] == [("Tell me", None), ("  a joke", None)]
    with pytest.raises(
        ConfigError, match=r"line 1: the ground truth is null: set reward.custom.*.a text file has none"
    ):
        load(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes(b"one\ncaf\xe9\n")
    with pytest.raises(ConfigError, match=r"a.txt, line 2: not UTF-8 \(byte 0xe9\)"):
        load(tmp_path / "a.txt", needs_truth=False)
