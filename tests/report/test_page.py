"""The page as a whole: it parses, needs nothing else, shows every text as text, and opens for whatever a run left."""

import base64
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import zlib
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from hybridrl.report import write_report
from hybridrl.report.__main__ import main
from hybridrl.report.markup import message_of
from hybridrl.report.page import render_page
from hybridrl.required import required
from tests.report.synthetic import HOSTILE, conversation, hostile, verl_sample, write_metrics, write_run, write_samples

VOID = {"meta", "input", "img", "br", "wbr"}


class Page(HTMLParser):
    """Elements with their attributes, texts by element, and whether every element is closed in its place."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._open: list[str] = []
        self._html = html
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open[-1]] = self.texts.get(self._open[-1], "") + data

    @property
    def sentence(self) -> str:
        """The run in one sentence, below its name."""
        return unescape(re.search('<p class="sentence">(.*?)</p>', self._html)[1])

    @property
    def data(self) -> dict[str, Any]:
        """What the script reads, with the samples unpacked."""
        data = json.JSONDecoder().raw_decode(self.texts["script"])[0]
        rest = data["rest"] or json.loads(zlib.decompress(base64.b64decode(data["packed"]), -15))
        return data | rest


def page_of(*runs: Path) -> Page:
    return Page(render_page(runs))


def test_the_page_of_a_run_has_its_sentence_its_lights_and_eight_panels(tmp_path):
    page = page_of(write_run(tmp_path / "run"))
    assert page.sentence.startswith("Reward 0.")
    assert "over 12 steps; validation 0.00 → 0.95" in page.sentence and "ended normally." in page.sentence
    assert sum(required(attributes.get("class", "")).startswith("light ") for _, attributes in page.elements) == 5
    assert len(page.data["panels"]) == 8


@pytest.mark.parametrize(
    ("config", "title"),
    [
        ("actor_rollout_ref: {model: {path: Qwen/Qwen3-0.6B}}\nalgorithm: {adv_estimator: grpo}\n"
         "data: {train_files: [/data/gsm8k.parquet, math.jsonl]}", "Qwen3-0.6B · grpo · gsm8k.parquet and 1 more"),
        ("actor_rollout_ref: {model: {path: runs/warmup/global_step_450/actor/huggingface}}\n"
         "algorithm: {adv_estimator: gae}\ndata: {train_files: train.jsonl}", "warmup · gae · train.jsonl"),
        ("model: {path: /models/base/}\ndata: {train_files: [chats.jsonl]}", "base · sft · chats.jsonl"),
        ("actor_rollout_ref: [3]\nalgorithm: 7\ndata: {train_files: 5}", "5"),
        ("", "run"),
    ],
)  # fmt: skip
def test_the_page_of_a_run_is_titled_by_model_algorithm_and_rows(tmp_path, config, title):
    run = write_run(tmp_path / "run")
    (run / "config.yaml").write_text(config)
    page = page_of(run)
    assert page.texts["title"] == f"{title} · run report" and page.texts["h1"] == title


def test_a_browser_without_scripts_shows_the_picture_that_the_run_has_drawn(tmp_path):
    run = write_run(tmp_path / "run")
    assert not any(tag == "img" for tag, _ in page_of(run).elements)
    (run / "curves.png").write_bytes(b"a picture")
    (source,) = (required(attributes["src"]) for tag, attributes in page_of(run).elements if tag == "img")
    assert base64.b64decode(source.removeprefix("data:image/png;base64,")) == b"a picture"


def test_nothing_is_loaded_from_elsewhere(tmp_path):
    html = render_page([write_run(tmp_path / "run", record=hostile)])
    for _, attributes in Page(html).elements:
        for name in ("src", "href", "action", "data", "poster"):
            assert not re.match(r"\s*(https?:)?//", attributes.get(name) or "")
    assert "@import" not in html and "default-src 'none'" in html


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_no_text_of_a_run_becomes_a_part_of_the_page(tmp_path, number):
    text = HOSTILE[number]

    def record(*arguments: Any) -> dict[str, Any]:
        known = hostile(*arguments)
        known["episode"]["messages"] = [{"role": text[:50], "content": text, "tool_calls": [{"function": text}]}]
        return known | {"input": text, "output": text, "gts": text}

    run = write_run(tmp_path / "run", steps=3, prompts=2, n=2, record=record, end="worker-died")
    (run / "logs" / "train-0.log").write_text(f"Traceback (most recent call last):\n{text}", errors="replace")
    (run / "config.yaml").write_text("trainer: {experiment_name: '</style><script>x</script>'}\n")
    plain = page_of(write_run(tmp_path / "plain", steps=3, prompts=2, n=2, end="worker-died"))
    page = page_of(run)
    assert sum(tag == "script" for tag, _ in page.elements) == sum(tag == "script" for tag, _ in plain.elements) == 2
    assert not any(tag == "img" or "onerror" in attributes for tag, attributes in page.elements)
    samples = page.data["samples"]
    assert any(one["output"].startswith(text[:300]) for one in samples["samples"])


def test_the_page_can_be_written_with_half_surrogates_in_it(tmp_path):
    run = write_run(tmp_path / "run", record=hostile)
    path = write_report([run], tmp_path / "report.html")
    assert path.read_text(encoding="utf-8").isprintable() is False
    assert "\\ud800" in path.read_text(encoding="utf-8")
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []


def test_a_run_that_was_killed_in_its_third_step(tmp_path):
    run = write_run(tmp_path / "run", steps=2, end=None)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "critic/sco')
    with (run / "rollouts" / "2.jsonl").open("a") as file:
        file.write('{"input": "user: 1 + ')
    page = page_of(run)
    assert "killed after step 2" in page.sentence and "The run was killed" in page.texts["h2"]


def test_a_run_that_failed_before_its_first_step(tmp_path):
    run = write_run(tmp_path / "run", steps=0, validate_every=0, end="engine-start")
    shutil.rmtree(run / "global_step_0")
    (run / "metrics.jsonl").unlink()
    (run / "logs" / "rollout-0.log").write_text("x\nTraceback (most recent call last):\n  a\nRuntimeError: no memory\n")
    page = page_of(run)
    assert page.sentence == "No step was finished; failed before its first step [engine-start]."
    assert "RuntimeError: no memory" in page.texts["pre"]
    assert "no checkpoint was saved" in page.texts["li"]
    assert page.data["panels"] == []


def test_an_empty_directory_and_one_that_is_missing(tmp_path):
    assert "no record of how it ended" in page_of(tmp_path).sentence
    assert "is not a directory" in page_of(tmp_path / "missing").texts["li"]


def test_a_run_without_validation_and_without_samples(tmp_path):
    run = write_run(tmp_path / "run", validate_every=0)
    shutil.rmtree(run / "rollouts")
    page = page_of(run)
    assert "validation" not in page.sentence
    assert "no training samples" in page.texts["li"] and "no validation samples" in page.texts["li"]
    assert "Not logged: Validation." in page.texts["p"]


def test_a_run_that_was_resumed_three_times_has_a_mark_for_each(tmp_path):
    page = page_of(write_run(tmp_path / "run", resumed=(3, 6, 9)))
    assert [mark[:2] for mark in page.data["runs"][0]["marks"]] == [[step, "resume"] for step in (3, 6, 9)]
    assert "Vertical lines: resumed at step 3, 6, 9." in page.texts["p"]


def test_two_directories_of_verls_rollout_files(tmp_path):
    for name in ("one", "two"):
        for step in (1, 2, 3):
            write_samples(tmp_path / name / f"{step}.jsonl", step, 3, 4, 0.5, random.Random(step), verl_sample)
    page = page_of(tmp_path / "one", tmp_path / "two")
    assert page.texts["h1"] == "2 runs"
    samples = page.data["samples"]["samples"]
    assert {one["run"] for one in samples} == {0, 1} and {one["step"] for one in samples} == {1, 2, 3}
    assert not any(one["stored"] for one in samples)
    assert "The configurations agree." not in page.texts["p"]


def test_the_rewards_of_verls_files_are_those_of_their_samples(tmp_path):
    for step in range(1, 11):
        write_samples(tmp_path / f"{step}.jsonl", step, 3, 4, step / 10, random.Random(step), verl_sample)
    page = page_of(tmp_path)
    scores = [json.loads(line)["score"] for line in (tmp_path / "1.jsonl").open()]
    assert page.sentence.startswith(f"Reward {fmean(scores):.2f} → ") and "over 10 steps" in page.sentence
    assert "Does it learn?" in page.texts["strong"] and "Are the devices busy?" not in page.texts["strong"]


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "faults.jsonl", "config.yaml", "rollouts/2.jsonl", "samples/4.jsonl"]
)
@pytest.mark.parametrize("torn", [b"", b"\x00\xff\xfe{", b"[1, 2]\n3\nnull\n{}\n", b"{" * 3000, None])
def test_a_file_that_is_torn_or_a_directory_costs_only_its_part(tmp_path, name, torn):
    run = write_run(tmp_path / "run")
    (run / name).unlink()
    if torn is None:
        (run / name).mkdir()
    else:
        (run / name).write_bytes(torn)
    assert page_of(run).sentence


def damaged(value: Any, draw: random.Random) -> Any:
    """A value of JSON with some of its parts left out, or replaced by what nobody expects."""
    if draw.random() < 0.15:
        return draw.choice([None, True, -1, 1e308, float("nan"), "x", [], {}, [1], {"a": 1}, "\ud800", 10**30])
    if isinstance(value, dict):
        return {key: damaged(each, draw) for key, each in value.items() if draw.random() > 0.03}
    return [damaged(each, draw) for each in value] if isinstance(value, list) else value


@pytest.mark.filterwarnings("error")
def test_whatever_is_damaged_the_page_is_written(tmp_path):
    source = write_run(tmp_path / "source", steps=5, prompts=2, n=3, record=conversation)
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    for seed in range(60):
        draw, run = random.Random(seed), tmp_path / f"run{seed}"
        shutil.copytree(source, run)
        for name in draw.sample(files, 4):
            content = (run / name).read_bytes()
            if name.suffix in (".json", ".jsonl") and draw.random() < 0.7:
                records = [content] if name.suffix == ".json" else content.splitlines()
                lines = [json.dumps(damaged(json.loads(record), draw)) for record in records]
                (run / name).write_text("\n".join(lines) + "\n")
            else:
                torn = bytearray(content[: draw.randrange(len(content) + 1)])
                for _ in range(min(len(torn), 10)):
                    torn[draw.randrange(len(torn))] = draw.randrange(256)
                (run / name).write_bytes(torn)
        assert page_of(run).data["runs"]


@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_named(tmp_path, name):
    run = write_run(tmp_path / "run")
    (run / "global_step_12" / name).write_text("{}" if name == "manifest.json" else "torn")
    html = render_page([run])
    assert "global_step_12" in html and "no good checkpoint" in html


def test_records_with_fields_of_other_types_are_shown_as_they_are(tmp_path):
    def odd(*arguments: Any) -> dict[str, Any]:
        known = conversation(*arguments)
        known["episode"] |= {"messages": [None, 3, {"content": [{"type": "text"}], "tool_calls": [4]}], "turns": [5]}
        known["episode"] |= {
            "advantage": "large",
            "sampled_tokens": "many",
            "tokens": {"ids": [1], "texts": 3},
            "row": [1],
        }
        return known | {"score": float("nan"), "gts": {"a": [1]}, "extra": float("inf")}

    page = page_of(write_run(tmp_path / "run", record=odd))
    assert page.data["samples"]["samples"]


def test_a_supervised_run_shows_its_losses(tmp_path):
    usual = {"train/grad_norm": 1.0, "timing_s/step": 1.0}
    write_metrics(tmp_path, [{"train/loss": 2 / step} | usual for step in range(1, 9)])
    (tmp_path / "config.yaml").write_text("trainer: {total_epochs: 1}\nmodel: {path: x}\n")
    page = page_of(tmp_path)
    assert page.sentence.startswith("Loss 2.00 → 0.32 over 8 steps")
    assert [panel["title"] for panel in page.data["panels"]] == ["Loss", "Gradient norm", "Seconds per step"]


def test_a_secret_in_the_configuration_is_not_in_the_page(tmp_path):
    runs = [write_run(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))]
    assert "very-secret" not in render_page(runs[:1]) + render_page(runs)


def test_long_runs_and_long_texts_keep_to_five_megabytes(tmp_path):
    def long(*arguments: Any) -> dict[str, Any]:
        known = verl_sample(*arguments)
        return known | {"output": str(arguments) * 2000, "input": f"user: {arguments[1]} " + "y" * 20_000}

    html = render_page([write_run(tmp_path / "run", steps=700, rollouts_every=20, record=long)])
    assert len(html.encode()) < 5e6
    data = Page(html).data
    assert max(len(series["y"]) for series in data["runs"][0]["series"].values()) <= 600


def test_the_comparison_names_what_differs(tmp_path):
    first, second = (write_run(tmp_path / f"run{seed}", seed=seed) for seed in (0, 1))
    page = page_of(first, second)
    assert (
        "trainer.seed" in page.texts["code"]
        and "trainer.resume_mode" not in page.texts["code"].split("Continue")[0][:200]
    )
    assert "20 the same of 20 questions" in page.texts["td"]
    assert "acc of toy/sums, step 12 - step 12" in page.texts["td"]
    assert len(page.data["panels"]) == 8 and len(page.data["runs"]) == 2


def test_runs_are_compared_by_a_variable_that_all_of_them_have(tmp_path):
    def graded(*arguments: Any) -> dict[str, Any]:
        known = verl_sample(*arguments)
        return {name: value for name, value in known.items() if name != "acc"}

    first = write_run(tmp_path / "first", seed=0, record=verl_sample)
    assert "reward, step 12 - step 12" in page_of(first, write_run(tmp_path / "other", record=graded)).texts["td"]


def test_the_command_writes_into_the_run_and_imports_nothing_heavy(tmp_path):
    run = write_run(tmp_path / "run")
    code = (
        "import sys; from hybridrl.report.__main__ import main; status = main([sys.argv[1]]);"
        "print(status, {'torch', 'ray', 'vllm', 'transformers', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 set()"
    assert (run / "report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["empty"], "error: empty: there are no metrics, faults, configuration and samples; name a run's directory\n"),
        (["missing"], "error: missing: there is no such directory; name a run's directory\n"),
        (["run"] * 9, "error: 9 runs are more than a page can compare; name at most 8\n"),
        (["run", "--out", "nowhere/a.html"], "error: --out=nowhere/a.html: there is no directory nowhere; make it, or"),
        (["run", "--out", "empty"], "error: --out=empty is a directory; name a file\n"),
    ],
)
def test_what_no_page_can_be_made_of_is_rejected_in_a_sentence(tmp_path, arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "run", steps=1)
    (tmp_path / "empty").mkdir()
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(message)
    assert not list((tmp_path / "empty").iterdir()) and not (run / "report.html").exists()


def test_a_port_that_is_taken_is_rejected(tmp_path, capsys):
    run = write_run(tmp_path / "run", steps=1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([str(run), "--serve", str(port)]) == 2
    assert f"error: --serve={port}: 127.0.0.1:{port} cannot be used (Address already in use)" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["run", "--serve", "70000"], ["run", "--samples", "0"]])
def test_arguments_that_cannot_be_are_rejected_and_nothing_is_written(tmp_path, arguments, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "run", steps=1)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and "error" in capsys.readouterr().err
    assert not (run / "report.html").exists()


def test_the_page_replaces_regular_files_only(tmp_path, capsys):
    run = write_run(tmp_path / "run", steps=1)
    os.mkfifo(tmp_path / "pipe")
    for out in (run, tmp_path / "pipe"):
        before = sorted(out.parent.iterdir())
        assert main([str(run), "--out", str(out)]) == 2
        assert "name a file" in capsys.readouterr().err and sorted(out.parent.iterdir()) == before


def test_at_most_four_pictures_of_a_sample_and_forty_of_the_page_are_in_it_once(tmp_path):
    """Each prompt has five pictures, the first of which all prompts have."""
    data = b"\xff\xd8 a JPEG"

    def seeing(step: int, position: int, *_: Any) -> dict[str, Any]:
        names = [
            f"{number:016x}" for number in (0, *range(100 * step + 4 * position + 1, 100 * step + 4 * position + 5))
        ]
        images = [{"digest": name, "width": 9, "height": 9, "file": f"pictures/{name}.jpg"} for name in names]
        for name in names:
            (tmp_path / "rollouts" / "pictures").mkdir(exist_ok=True, parents=True)
            (tmp_path / "rollouts" / "pictures" / f"{name}.jpg").write_bytes(data)
        return {"input": f"{position}?", "output": "1", "gts": "1", "score": 1.0, "step": step} | {
            "episode": {"position": position, "images": images}
        }

    write_run(tmp_path, validate_every=0, record=seeing)
    page = page_of(tmp_path)
    samples, pictures = page.data["samples"]["samples"], page.data["samples"]["pictures"]
    assert len(pictures) == 40 and max(len(one.get("images", ())) for one in samples) == 4
    assert {*pictures.values()} == {f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"}
    assert all(name in pictures for one in samples for name in one.get("images", ()))
    shutil.rmtree(tmp_path / "rollouts" / "pictures")
    assert page_of(tmp_path).data["samples"]["pictures"] == {}


def test_a_picture_of_a_conversation_is_a_mark_in_its_text():
    parts = [{"type": "image", "digest": 5}, {"type": "text", "text": "Now?"}]
    assert message_of({"role": "user", "content": parts}) == {"role": "user", "text": "<image>Now?"}
    assert message_of({"role": "user", "content": [1, 2]})["text"] == "[1, 2]"
