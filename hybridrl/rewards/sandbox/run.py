"""Run Python programs with limits on time, memory, output, processes, files and network; return what they print.

Every run is its own process whose system calls are filtered (`confinement.py`), a limit that needs no privileges
and holds in containers too. It is not a virtual machine: docs/rewards.md lists what it does not protect against.
"""

import json
import math
import os
import secrets
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hybridrl.config import ConfigError
from hybridrl.config.custom_code import once
from hybridrl.rewards.sandbox.confinement import pack_modules, supported

_ROOT = str(Path(__file__).resolve().parents[3])
# Neither the environment nor installed packages: only the standard library can be imported.
START = (
    "import sys; sys.path.append({root!r}); from hybridrl.rewards.sandbox.{module} import main; sys.path.pop(); "
    "main{descriptors}"
)


_packed = once(pack_modules)


class SandboxError(RuntimeError):
    """The sandbox itself failed, not the program in it."""


@dataclass(frozen=True)
class ProgramLimits:
    """CPU seconds, memory in MiB and printed characters per run; seconds for all runs of a program together."""

    seconds: float = 5.0
    memory_mb: int = 1024
    output: int = 1 << 16
    total_seconds: float = 20.0


def check_sandbox() -> None:
    """Raise ConfigError on a machine on which programs cannot be confined."""
    if not supported():
        raise ConfigError(
            "the reward for code runs programs behind Linux's filter for system calls, on x86_64 and aarch64",
            fix="set reward.custom_reward_function.path to a function that runs them elsewhere",
        )


def run(
    program: str,
    inputs: list[Any],
    limits: ProgramLimits,
    kind: Literal["stdin", "call", "asserts"] = "stdin",
    function: str = "",
) -> list[str | None]:
    """Return what each run printed; None for a run that failed, exceeded a limit or did not fit in `total_seconds`.

    "stdin": an input is text to read. "call": it is the arguments of `function` (a global, or a method of the class
    Solution), and the output is the returned value as JSON. "asserts": it is code to run after the program, and the
    output is empty.
    """
    check_sandbox()
    mark = secrets.token_hex(16) if kind == "call" else ""
    cpu = max(math.ceil(limits.seconds), 1)
    job = {
        "program": program,
        "inputs": [] if kind == "asserts" else inputs,
        "kind": kind,
        "function": function,
        "mark": mark,
        "wall_seconds": 2 * limits.seconds + 1,  # on a busy machine a run gets less CPU time than wall time
        "limits": {"AS": limits.memory_mb << 20, "CPU": cpu, "FSIZE": limits.output, "CORE": 0, "NOFILE": 64},
    }
    with open(os.memfd_create("tests"), "w+") as tests:
        json.dump(inputs, tests)
        tests.seek(0)
        packed = _packed()
        module, descriptors = ("asserts", (packed, tests.fileno())) if kind == "asserts" else ("inside", (packed,))
        lines = _lines(module, descriptors, json.dumps(job), limits.total_seconds)
    outputs = [json.loads(line) for line in lines[: len(inputs)]]
    if mark:  # only a run that was completed has printed it
        parts = [(output or "").rpartition(mark) for output in outputs]
        outputs = [after.strip() if marked else None for _, marked, after in parts]
    return outputs + [None] * (len(inputs) - len(outputs))


def _lines(module: str, descriptors: tuple[int, ...], job: str, seconds: float) -> list[bytes]:
    """Return a line for each run that ended in time."""
    start = START.format(root=_ROOT, module=module, descriptors=descriptors)
    command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", start]
    options: dict[str, Any] = {"capture_output": True, "env": {}, "cwd": "/", "pass_fds": descriptors}
    try:
        done = subprocess.run(command, input=job.encode(), timeout=seconds, **options)
    except subprocess.TimeoutExpired as expired:
        return (expired.stdout or b"").split(b"\n")[:-1]  # the last may be incomplete
    if done.returncode:
        raise SandboxError(f"the sandbox ended with {done.returncode}: {done.stderr.decode(errors='replace')[-500:]}")
    return done.stdout.splitlines()
