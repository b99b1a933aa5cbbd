"""Every script runs: `--help` answers at once, and the smallest run of a script prints every row that it promises."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hybridrl.config import PPOConfig
from hybridrl.config.load import resolve_config
from tests.changed_drills import called_for, script_of
from tests.report.synthetic import write_run
from tests.scripts import run_script

ROOT = Path(__file__).parents[2]
BENCHMARK = ROOT / "scripts" / "benchmark"
PYTHON = sorted(
    file.relative_to(ROOT).as_posix() for file in ROOT.glob("scripts/**/*.py") if '"__main__"' in file.read_text()
)
SHELL = sorted(file.relative_to(ROOT).as_posix() for file in ROOT.glob("scripts/*.sh"))
# Scripts that run elsewhere: in the test file named, or as a side of another script.
ELSEWHERE = {
    "scripts/mutation.py": "tests/test_mutation.py",
    "scripts/simulate_async.py": "tests/simulation/test_simulate_command.py",
    "scripts/sizing.py": "tests/doctor/test_pages.py",
    "scripts/benchmark/bare.py": "scripts/benchmark/step.py",
    "scripts/benchmark/export.py": "scripts/benchmark/all.py",
    "scripts/benchmark/families.py": "tests/integration/test_families.py",
    "scripts/benchmark/gradient.py": "scripts/benchmark/pretrained.py",
    "scripts/benchmark/log_probs.py": "scripts/benchmark/all.py",
    "scripts/benchmark/stacks.py": "tests/runtime/test_stacks.py",
    "scripts/benchmark/stacks_actor.py": "scripts/benchmark/stacks.py",
    "scripts/benchmark/timed_start.py": "scripts/benchmark/start_up.py",
    "scripts/benchmark/trl_peer.py": "scripts/benchmark/step.py",  # in an environment with TRL
}
BROWSER = """#!/bin/bash
echo "<title></title>"
for argument; do case $argument in --screenshot=*) echo drawn >"${argument#*=}" ;; esac; done
"""
HUMAN_EVAL = {"task_id": "HumanEval/0", "prompt": "def one():\n", "canonical_solution": "    return 1\n"}
HUMAN_EVAL |= {"entry_point": "one", "test": "def check(candidate):\n    assert candidate() == 1\n"}
MBPP = {"task_id": 11, "code": "def one():\n    return 1", "test_setup_code": "", "test_list": ["assert one() == 1"]}
SOLVED = {"question": "What is 1+2?", "answer": "1+2=3\n#### 3"}
FRACTION = {"prediction": "\\boxed{\\frac{1}{2}}", "ground_truth": "\\frac{1}{2}"}


@dataclass(frozen=True)
class Tiny:
    """The smallest run of a script: its arguments, where HERE is its directory and QUICKSTART that of the quickstart's
    data, the beginnings of the rows that it must print, and the files that it must write."""

    arguments: str = "--tiny"
    rows: list[str] = field(default_factory=list)
    files: str = ""


RUNS = {
    "scripts/generated_pages.py": Tiny("--out HERE", files="coming_from.md metrics.md"),
    "scripts/report_screenshot.py": Tiny("HERE/run --out HERE/report.png", files="report.png"),
    "advantages": Tiny(rows=["GAE [16, 32]", "GRPO 64 samples"]),
    "algorithms": Tiny("--tiny --out HERE/runs --docs HERE/docs", ["gae ", "| gae |"], "docs/algorithms.png"),
    "all": Tiny(
        "--tiny export log_probs --out HERE/out --docs HERE/docs/benchmarks.md",
        ["| export of", "| log-probs and gradients, any", "| log-probs and gradients, a sum", "| peak of that"],
        "docs/benchmarks.png",
    ),
    "asynchronous": Tiny(rows=["| tail, continued: a step", "| its gain over the", "| seconds of rollout"]),
    "bfloat16_updates": Tiny(rows=["| 1e-06 | bfloat16 |", "| 0.001 | float32 |"]),
    "cluster_check": Tiny(rows=["  2 machines,   1 pairs"]),
    "compiled": Tiny(rows=["| update, layers compiled", "| first two updates"]),
    "count_update": Tiny(
        rows=[
            "| tiny, token-mean, micro-batches: 1: launches, layers",
            "| tiny, token-mean, micro-batches: 4: waits of the host",
            "| tiny, seq-mean-token-mean, micro-batches: 4: copies from the host",
        ]
    ),
    "data": Tiny("--tiny QUICKSTART/model", [".jsonl: 100 prompts", ".parquet: 100 prompts"]),
    "data_plane": Tiny(
        rows=[
            "| 64 rows of 64 tokens",
            "| bytes per row",
            "| driver, 512 rows on 2 ranks",
            "| driver, 2,048 rows on 16 ranks",
        ]
    ),
    "driver": Tiny(rows=["| 64 | on |", "| 64 | off |"]),
    "engine_memory": Tiny(rows=["step     1", "step     2"]),
    "episodes": Tiny(rows=["4 episodes x 2 turns x 4 tokens", "episodes "]),
    "episodes --sleeping": Tiny("--tiny --sleeping", ["coroutines", "plain functions"]),
    "evaluation": Tiny(rows=["| main_eval on 1 device"]),
    "fuzz_endpoint": Tiny(
        "--tiny run --out HERE",
        ["/v1/chat/completions: 8", "/v1/completions: 8", "/v1/responses: 8", "/v1/messages: 8"],
    ),
    "gpu": Tiny(
        rows=[
            "| start-up, tiny |",
            "| weight sync, seconds, tiny |",
            "| switch there and back, seconds, tiny |",
            "| sleep and wake, seconds, tiny |",
            "| update, share of the peak, with recomputation, tiny |",
            "| log-probs, peak beyond kept memory, relative to that of full logits, tiny |",
            "| rollout, tiny |",
            "| difference of log-probs, mean, tiny |",
            "| sleeping engine, GiB on the device, tiny |",
            "| update, share of the peak, without recomputation, tiny |",
            "| rollout against vLLM's generate, its engine in the caller's process, tiny |",
            "| rollout against vLLM's generate, its engine in its own process, vLLM's default, tiny |",
        ]
    ),
    "host_floor": Tiny(
        rows=[
            "| sharded, ranks: 1, micro-batches: 1, token-mean: update",
            "| not sharded, ranks: 1, micro-batches: 1, token-mean: norm and clipping",
        ]
    ),
    "kills": Tiny("--tiny --out HERE", ["synchronous, run 0: as the unbroken one", "1 of 1 runs"]),
    "length_bias": Tiny(rows=["| characters of a response"]),
    "load_memory": Tiny(rows=["rank 0: at most", "rank 1: at most"]),
    "lora": Tiny("--tiny --out HERE/runs --docs HERE/docs", ["| adapter |", "| LoRA, rank 16 |"]),
    "memory_plan": Tiny(rows=["rollout: planned", "weight sync: planned", "peak without imports: planned"]),
    "merge": Tiny(
        rows=[
            "  cp ",
            "  write from a buffer ",
            "  merge ",
            "  export from memory ",
            "  safetensors save_file ",
            "  check of the tensors ",
            "  float32 ",
            "  bfloat16 ",
            "greedy tokens: ",
        ]
    ),
    "pictures": Tiny(
        rows=["| most bytes in the object store, 4 x 8", "| pictures stored 2 steps later", "| bytes for its picture"]
    ),
    "peak_memory": Tiny("--tiny sleep 1", ["peak memory "]),
    "pretrained": Tiny(
        "--tiny --out HERE/runs --docs HERE/docs/models.md",
        ["| GRPO, float32", "| `hybridrl merge`", "| An agent of two turns", "| Gradient of 8 answers"],
    ),
    "planning": Tiny(
        rows=[
            "| 128 rows to 64 ranks, uniform",
            "| 16 rows to micro-batches of 16,384, uniform",
            "| 16 rows to micro-batches of 16,384, uniform 1..2,048, all full",
            "| attention and its gradient, quickstart",
            "| attention and its gradient, 25M",
            "| attention and its gradient, 0.5B",
            "| GAE [16, 2048], full rows",
            "| GAE [16, 2048], heavy-tailed rows",
            "| select, 32 rows of about 614 tokens in 2 parts",
            "| select, 32 rows of about 614 tokens in 32 parts",
        ]
    ),
    "reading_pictures": Tiny("--tiny --out HERE/reading.png", files="reading.png"),
    "records": Tiny(rows=["8 records, tokens of 0", "8 records, tokens of 4"]),
    "reference_solutions": Tiny("HERE/he.jsonl HERE/mbpp.jsonl", ["he.jsonl: 1 of 1 ", "mbpp.jsonl: 1 of 1 "]),
    "report": Tiny(rows=["| 200 steps, 200 samples: write", "| 200 steps, 200 samples: open", "| 2 steps, samples of"]),
    "rewards": Tiny(
        "--tiny HERE/gsm8k.jsonl HERE/math.jsonl --tokenizer QUICKSTART/model",
        ["GSM8K  ", "GSM8K, decoded by an actor", "MATH (math-verify)", "MATH, truths that are", "code, a program"],
    ),
    "save_stall": Tiny(
        rows=["2 ranks: ", "  copied in memory ", "  stall of the first save ", "  a save that training"]
    ),
    "sequence_parallel": Tiny(
        rows=["| memory per rank, rows of 512", "| two rows of 1024 tokens", "| memory per rank and additional token"]
    ),
    "start_up": Tiny(
        rows=[
            "| import of hybridrl.main_ppo",
            "| configuration",
            "| imports of the driver",
            "| checks",
            "| data and reward",
            "| Ray",
            "| actors requested",
            "| engines and trainers",
            "| first weight sync",
            "| first step",
        ]
    ),
    "step": Tiny(
        rows=[
            "| whole step over bare vLLM + torch (25m, 1 slots)",
            "| rollout against vLLM's generate (25m, 1 slots)",
            "| update against bare torch (25m, 1 slots)",
            "| share of a step outside its work (25m, 1 slots)",
        ]
    ),
    "sweep": Tiny("--tiny -- --cfg job", ["| 2 runs of 1 steps"]),  # prints the configurations
    "teacher_update": Tiny(
        rows=["| tiny, 4 x 8 tokens: teacher and exact KL |", "| tiny, 4 x 8 tokens: two teachers and teacher |"]
    ),
    "threads": Tiny(
        rows=[
            "| 20 products of 128 x 384 x 1,280 over 300,000 spins |",
            "| an update of tiny parameters over 5,000 spins |",
            "| 20 products of 128 x 384 x 1,280 over none, busy machine |",
            "| an update of tiny parameters over none, busy machine |",
        ]
    ),
    "trees": Tiny(
        rows=[
            *(f"| {what}, {case} |" for case in ("25m", "prompt", "turns") for what in ("gradient", "old log-probs")),
            "| gradient, quickstart |",
            "| attention and its gradient, 24 and 60 |",
            "| attention and its gradient, 1,024 and 512 to 1,024 |",
        ]
    ),
    "weight_sync": Tiny(
        rows=[
            "| weight sync, tiny",
            "| weight sync over a copy",
            "| back to training",
            "| tokens/s after a weight sync",
        ]
    ),
}


# That take longest: of the product's own parts they use what others do, or what other tests do, so that .ci/run has one
# of them in turn.
DRILLS = {
    *("algorithms", "asynchronous", "compiled", "data", "data_plane", "driver", "engine_memory", "episodes"),
    *("episodes --sleeping", "evaluation", "fuzz_endpoint", "gpu", "host_floor", "kills", "length_bias", "load_memory"),
    *(
        "lora",
        "memory_plan",
        "merge",
        "pictures",
        "planning",
        "pretrained",
        "reading_pictures",
        "rewards",
        "save_stall",
    ),
    *("sequence_parallel", "start_up", "step", "teacher_update", "threads", "trees", "weight_sync"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with what scripts read: pages without their tables, rows, a run; and a stand-in of a browser."""
    (tmp_path / "docs").mkdir()
    for page in ("algorithms.md", "lora.md", "models.md", "benchmarks.md"):
        text = (ROOT / "docs" / page).read_text()
        (tmp_path / "docs" / page).write_text(re.sub(r"(?m)^\|.*$", "", text))
    files = {"he": HUMAN_EVAL, "mbpp": MBPP, "gsm8k": SOLVED, "math": FRACTION}
    for name, row in files.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    write_run(tmp_path / "run", steps=4)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "chromium").write_text(BROWSER)
    (tmp_path / "bin" / "chromium").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path


def test_every_script_has_a_smallest_run() -> None:
    assert sorted([*{script_of(name.split()[0]) for name in RUNS}, *ELSEWHERE]) == PYTHON
    for script, file in ELSEWHERE.items():
        assert Path(script).name in (ROOT / file).read_text(), f"{file} does not run {script}"


def test_a_change_calls_for_the_drills_of_the_scripts_that_use_it():
    """The module of `timed_start`, whose name is in a string of `start_up`; a script next to others; any other file."""
    test = "tests/integration/test_scripts.py::test_a_script_runs_at_its_smallest_size"
    drills = [*(f"{test}[{name}]" for name in sorted(DRILLS)), "tests/integration/test_silence.py::test_one[sleep]"]

    def scripts(changed: str) -> list[str]:
        return [drill.partition("[")[2].removesuffix("]") for drill in called_for(drills, {changed})]

    assert scripts("hybridrl/runs/command.py") == ["start_up"]
    assert scripts("scripts/benchmark/waiting_environments.py") == ["episodes", "episodes --sleeping"]
    assert scripts("tests/integration/test_silence.py") == scripts("README.md") == []


@pytest.fixture
def next_to_scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process imports what is next to a script, for the time of a test: forty processes would take minutes."""
    monkeypatch.syspath_prepend(str(BENCHMARK))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.delitem(sys.modules, "hybridrl.core.rollout.vllm.engine", raising=False)  # imposed.py would change it
    loaded = {*sys.modules}
    yield
    for name in {*sys.modules} - loaded:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "scripts")):
            del sys.modules[name]


@pytest.mark.parametrize("script", PYTHON)
def test_a_script_asked_for_help_answers_and_does_nothing_else(script, next_to_scripts, capsys):
    status = run_script(ROOT / script, "--help")
    printed = capsys.readouterr().out
    assert not status and printed.startswith(f"usage: {Path(script).name}"), printed


@pytest.mark.parametrize("script", SHELL)
def test_a_shell_script_asked_for_help_names_its_arguments_and_does_nothing_else(script, tmp_path):
    """In a directory without the project, where all else fails."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / script, tmp_path / "scripts")
    asked = ["bash", str(tmp_path / script), "--help"]
    done = subprocess.run(asked, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert f"bash {script} [" in done.stdout + done.stderr
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [tmp_path / script]


@pytest.mark.slow
def test_runs_that_a_smallest_run_leaves_out_have_a_valid_configuration(next_to_scripts, monkeypatch, tmp_path):
    import algorithms
    import gpu
    import kills
    import lora
    import pretrained
    import reading_pictures

    monkeypatch.chdir(tmp_path)
    every = [*algorithms.ENTRIES.values(), *lora.RUNS.values()]
    every = [overrides.split() for overrides in every]
    every += [*kills.MODES.values(), *gpu.VARIANTS.values(), *pretrained.RUNS.values(), *reading_pictures.RUNS.values()]
    for overrides in every:
        name = "agent" if overrides is kills.MODES["agents"] else "train"
        more = ["trainer.n_gpus_per_node=2", *(override.format(tmp_path) for override in overrides)]
        found = resolve_config(PPOConfig, more, name, ROOT / "recipes" / "quickstart", offline=True).findings
        assert [finding.text for finding in found.items if finding.severity == "error"] == [], overrides


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.drill if name in DRILLS else pytest.mark.slow) for name in RUNS]
)
def test_a_script_runs_at_its_smallest_size(name, here, tiny, monkeypatch):
    run = RUNS[name]
    arguments = run.arguments.replace("HERE", str(here)).replace("QUICKSTART", str(tiny)).split()
    monkeypatch.setenv("QUICKSTART_DATA", str(tiny))
    before = {file: file.read_bytes() for file in (ROOT / "docs").iterdir()}
    done = subprocess.run(
        [sys.executable, script_of(name.split()[0]), *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    printed = done.stdout + "".join(file.read_text() for file in here.glob("docs/*.md"))
    lines = printed.splitlines()
    rows = {row: [line.removeprefix(row) for line in lines if line.startswith(row)] for row in run.rows}
    assert [row for row, rests in rows.items() if not any(re.search(r"\d", rest) for rest in rests)] == [], done.stdout
    assert not re.search(r"\b(nan|inf|not measured)\b|failed: \w", done.stdout), done.stdout
    assert [file for file in run.files.split() if not (here / file).stat().st_size] == []
    assert {file: file.read_bytes() for file in (ROOT / "docs").iterdir()} == before
