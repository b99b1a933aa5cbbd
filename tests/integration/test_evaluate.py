"""An evaluation that is killed and started again has the table of an unbroken one, and samples nothing twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]


def command(tiny: Path, out: Path) -> list[str]:
    values = {
        "eval.files": tiny / "val.jsonl",
        "eval.models": tiny / "model",
        "eval.n": 8,
        "eval.temperature": 1.0,
        "eval.max_tokens": 48,
        "eval.greedy": True,
        "eval.output_dir": out.parent,
        "data.max_prompt_length": 32,
        "reward.custom_reward_function.path": ROOT / "tests" / "integration" / "length_reward.py",
        "reward.num_workers": 1,
        "trainer.n_gpus_per_node": 2,
        "trainer.default_local_dir": out.parent.parent / "run",
    }
    return [sys.executable, "-m", "hybridrl.main_eval", *(f"{key}={value}" for key, value in values.items())]


def lines(out: Path) -> list[bytes]:
    file = out / "samples.jsonl"
    return file.read_bytes().split(b"\n")[:-1] if file.is_file() else []


def kill_within(arguments: list[str], out: Path, least: int) -> None:
    """Start an evaluation, and kill its driver once there are `least` samples."""
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    limit = time.monotonic() + 300
    while len(lines(out)) < least and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.05)
    os.kill(psutil.Process(process.pid).children()[0].pid, signal.SIGKILL)
    assert process.wait(60) == 128 + signal.SIGKILL


@pytest.mark.drill
def test_a_killed_evaluation_resumes_with_the_same_table_and_samples_nothing_twice(tiny, tmp_path):
    places = tmp_path / "alone", tmp_path / "killed"
    alone, killed = (place / "model" for place in places)
    subprocess.run(command(tiny, alone), cwd=ROOT, check=True, capture_output=True)
    total = 200 * 9
    kill_within(command(tiny, killed), killed, 200)
    kept = lines(killed)
    assert 200 <= len(kept) < total
    with (killed / "samples.jsonl").open("ab") as file:
        file.write(b'{"dataset": "quickstart/addition", "id": "3", "resp')  # as a kill within a write leaves it

    subprocess.run(command(tiny, killed), cwd=ROOT, check=True, capture_output=True)
    results = [json.loads((out / "results.json").read_text()) for out in (alone, killed)]
    assert results[0]["datasets"] == results[1]["datasets"]
    assert [one["generated"] for one in results] == [total, total - len(kept)]
    assert lines(killed)[: len(kept)] == kept and len(lines(killed)) == total
    assert len({json.loads(line)["key"] for line in lines(killed)}) == total
    assert (alone / "table.md").read_text().replace("alone", "") == (killed / "table.md").read_text()

    again = subprocess.run(command(tiny, killed), cwd=ROOT, check=True, capture_output=True, text=True)
    assert "1800 responses are stored" in again.stdout and "starting Ray" not in again.stdout
