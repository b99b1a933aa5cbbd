"""A conversation with a real engine, as a user starts it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hybridrl.required import required
from hybridrl.runtime.keeper import started_with

pytestmark = pytest.mark.slow
SECONDS = 180


def start(model: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hybridrl", "chat", str(model), "device=cpu", *options]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A shell's background job would ignore Ctrl-C.
    return subprocess.Popen(
        command, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **pipes
    )


def test_a_prompt_and_the_first_line_of_a_pipe_get_the_same_response_and_nothing_else_is_printed(tiny):
    # Without the penalty the untrained model repeats one token.
    options, question = ("--temperature=0", "--max-tokens=12", "rollout.repetition_penalty=2.0"), "What is 1+2?"
    asked = start(tiny / "model", *options, "--prompt", question)
    once, errors = asked.communicate(timeout=SECONDS)
    assert asked.returncode == 0 and once.strip() and once.endswith("\n"), errors
    lines = [line for line in errors.splitlines() if line and "[cut off" not in line]
    assert len(lines) == 2 and all(line.startswith("starting an engine with model") for line in lines), errors
    piped = start(tiny / "model", *options, "rollout.max_model_len=120")
    every, errors = piped.communicate(f"{question}\n{question}\n/reset\n{question}\n", timeout=SECONDS)
    assert piped.returncode == 0 and "Traceback" not in errors, errors
    assert every.startswith(once) and every.endswith(once) and len(every) > 2 * len(once)


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(number, marks=pytest.mark.drill) for number in (signal.SIGTERM, signal.SIGKILL))],
)
def test_however_it_ends_while_it_responds_nothing_is_left(tiny, tmp_path, monkeypatch, number):
    name = f"CHAT={tmp_path}"
    monkeypatch.setenv("CHAT", str(tmp_path))
    process = start(tiny / "model", "--max-tokens", "400")
    lines, output, errors = (required(stream) for stream in (process.stdin, process.stdout, process.stderr))
    lines.write("What is 1+2?\n" * 50)
    lines.flush()
    assert output.read(1)
    assert len(started_with(name)) > 1
    process.send_signal(number)
    assert process.wait(30) == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    end = time.monotonic() + 20
    while left := [pid for pid in started_with(name) if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < end, left
        time.sleep(0.2)
    assert "Traceback" not in errors.read()
