"""`python -m hybridrl.doctor why DIR`: how a run is or why it ended, in one sentence, and the command to continue with.

Reads what a run leaves in its directory, however it ended, and writes nothing. Every code has a section in
docs/errors.md.
"""

import argparse
import json
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import yaml

from hybridrl.checkpoint.store import Checkpoint, holder, list_checkpoints
from hybridrl.config.values import value_of
from hybridrl.tracking import read_metrics
from hybridrl.tracking.faults import (
    ACTOR,
    FILE,
    FINISHED,
    PAGE,
    REQUESTED,
    STOPPED,
    Fault,
    last_run,
    read_faults,
)
from hybridrl.tracking.host import oom_kills
from hybridrl.tracking.sink import STEP_SECONDS

RUNNING, SILENT, KILLED, NOT_STARTED, MACHINE_RESTARTED = (
    "running",
    "silent",
    "killed",
    "not-started",
    "machine-restarted",
)
WELL = {RUNNING, FINISHED}
SILENT_SECONDS, SILENT_STEPS = 60.0, 5.0  # without a step: the greater of the seconds, and of so many times the median
FULL_BYTES = 1 << 20  # free, or fewer, on a disk that is full
SHOWN = 300  # characters of an error
ACTORS = "actor_rollout_ref"


@dataclass(frozen=True)
class Verdict:
    """Why a run is as it is: a stable code, one sentence, and the one command to continue with."""

    code: str
    cause: str
    command: str


class Remains:
    """What a run has left in its directory, or a living one has written so far."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.user, self.name = directory, holder(directory), shlex.quote(str(directory))
        self.faults: list[Fault] = last_run(read_faults(directory))
        self.metrics = read_metrics(directory)
        file, metrics = directory / "config.yaml", directory / "metrics.jsonl"
        self.config: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self.began = self.faults[0].at.timestamp() if self.faults else 0.0
        logged = metrics.stat().st_mtime if metrics.is_file() else 0.0
        self.logged = logged if logged > self.began - 1 else 0.0  # when this run last logged; a file's clock is coarse
        healthy = (one for one in reversed(list_checkpoints(directory)) if one.state["healthy"])
        self.saved: Checkpoint | None = next(healthy, None)

    @property
    def end(self) -> Fault | None:
        return self.faults[-1] if self.faults and self.faults[-1].end else None

    @property
    def last_step(self) -> int:
        return max(self.metrics, default=0)

    @property
    def place(self) -> str:
        if self.end is None:
            return f"after step {self.last_step}" if self.logged else "before its first step"
        return f"in step {self.end.step}" if self.end.step else "before its first step"

    @property
    def diagnoses(self) -> str:
        """What health rules report of the last step, as the continuation of a sentence."""
        held = [
            name.removeprefix("health/") for name, value in self._last.items() if name.startswith("health/") and value
        ]
        return f"; {', '.join(held)} held at the last step (docs/health.md)" if held else ""

    @property
    def _last(self) -> dict[str, float]:
        return self.metrics.get(self.last_step, {})

    def resume(self, *overrides: str) -> str:
        """Return the command that continues the run, from its last checkpoint if there is one."""
        module = "main_ppo" if not self.config or ACTORS in self.config else "main_sft"
        if not self.config:
            return f"python -m hybridrl.{module} key=value ..., as before"
        mode = ["trainer.resume_mode=auto"] * (
            self.config["trainer"]["resume_mode"] != "auto" and self.saved is not None
        )
        return " ".join([f"python -m hybridrl.{module} -cp {self.name} -cn config", *mode, *overrides])

    def check(self) -> str:
        """Return the command that checks the configuration, tries its reward, and plans its memory."""
        if ACTORS not in self.config:
            return self.resume()
        return f"python -m hybridrl.doctor -cp {self.name} -cn config"

    def report(self) -> str:
        return f"python -m hybridrl.doctor report {self.name}"

    def log(self) -> str:
        """Return the command that shows the log of the process to blame."""
        named = ACTOR.search(self.faults[-1].text)
        return f"less +G {self.name}/logs/{f'{named[1]}-{named[2]}' if named else '*'}.log"

    def listing(self) -> str:
        return f"python -m hybridrl.doctor checkpoints {self.name}"

    def with_less_memory(self) -> str:
        named = ACTOR.search(self.faults[-1].text)
        if ACTORS not in self.config:
            return self.resume(*(f"{key}={value // 2}" for key, value in [self._lookup("data.max_token_len_per_gpu")]))
        if named and named[1] == "rollout":
            key, share = self._lookup(f"{ACTORS}.rollout.gpu_memory_utilization")
            return self.resume(f"{key}={max(share - 0.1, 0.1):.2g}")
        key, rows = self._lookup(f"{ACTORS}.actor.ppo_micro_batch_size_per_gpu")
        if rows and rows > 1 and not self._lookup(f"{ACTORS}.actor.use_dynamic_bsz")[1]:
            return self.resume(f"{key}={rows // 2}")
        key, tokens = self._lookup(f"{ACTORS}.actor.ppo_max_token_len_per_gpu")
        longest = self.config["data"]["max_prompt_length"] + self.config["data"]["max_response_length"]
        return self.resume(f"{key}={max(tokens // 2, longest)}")

    def with_fewer_checkpoints(self) -> str:
        key = "trainer.max_actor_ckpt_to_keep"
        return self.resume(*[f"{key}=1"] * (bool(self.config) and self._lookup(key)[1] != 1))

    def with_a_lower_rate(self) -> str:
        key, rate = self._lookup(f"{ACTORS}.actor.optim.lr" if ACTORS in self.config else "optim.lr")
        return self.resume(f"{key}={rate / 10:.2g}")

    def _lookup(self, key: str) -> tuple[str, Any]:
        return key, value_of(self.config, key)


# Code of an end -> what it means, and the command to continue with.
ENDS: dict[str, tuple[str, Callable[[Remains], str]]] = {
    "device-memory": ("a device ran out of memory", Remains.with_less_memory),
    "host-memory": ("the machine ran out of memory", Remains.check),
    "disk-full": ("the disk is full", Remains.with_fewer_checkpoints),
    "save-failed": ("a checkpoint could not be saved", Remains.resume),
    "checkpoint-damaged": ("the checkpoint to resume from is damaged", Remains.listing),
    "worker-died": ("a process of the run died", Remains.resume),
    "worker-failed": ("a worker failed", Remains.report),
    "no-response": ("a process hung", Remains.resume),
    "engine-start": ("a rollout engine could not start", Remains.log),
    "rollout-failed": ("responses could not be sampled", Remains.log),
    "reward-faults": ("the reward function failed", Remains.check),
    "no-signal": ("there was nothing to learn from", Remains.check),
    "nothing-to-learn-from": ("there was nothing to learn from", Remains.check),
    "broken-updates": ("updates were not finite", Remains.with_a_lower_rate),
    "stale-weights": ("an engine did not compute with the trainer's weights", Remains.report),
    "disagreement": ("engine and trainer compute different log-probs", Remains.report),
    "wrong-mode": ("the program is at fault", Remains.report),
    "unexpected": ("the program is at fault", Remains.report),
}


def diagnose(directory: Path) -> Verdict:
    """Return how the run of a directory is, or why it ended."""
    remains = Remains(directory)
    if remains.user:
        return _living(remains)
    if not remains.faults and not remains.metrics:
        cause = f"no run has started in {directory}: if one was to, its configuration was rejected"
        return Verdict(NOT_STARTED, cause, "python -m hybridrl.doctor key=value ..., with the arguments of the run")
    end = remains.end
    if end is None:
        return _killed(remains)
    if end.code == FINISHED:
        return _finished(remains)
    if end.code == STOPPED:
        request = next((one.text for one in remains.faults if one.code == REQUESTED), end.text)
        return Verdict(STOPPED, f"{request} stopped it {remains.place}{_restart(remains)}", remains.resume())
    if end.code == "rejected":
        command = "python -m hybridrl.doctor key=value ..., with the arguments of the run"
        return Verdict(end.code, f"configuration or data were rejected before the start: {_shown(end.text)}", command)
    meaning, command_of = ENDS.get(end.code, ENDS["unexpected"])
    return Verdict(end.code, f"{meaning} {remains.place}: {_shown(end.text)}", command_of(remains))


def _living(remains: Remains) -> Verdict:
    now, follow = time.time(), f"tail -f {remains.name}/metrics.jsonl"
    if not remains.logged:
        seconds = now - (remains.began or now)
        return Verdict(RUNNING, f"{remains.user} has been starting it for {seconds:.0f} s", follow)
    times = [metrics[STEP_SECONDS] for metrics in list(remains.metrics.values())[-20:] if STEP_SECONDS in metrics]
    usual, silent = median(times) if times else 0.0, now - remains.logged
    where = f"{remains.user} did step {remains.last_step} {silent:.0f} s ago, and steps take {usual:.3g} s"
    if silent > max(SILENT_SECONDS, SILENT_STEPS * usual):
        return Verdict(SILENT, where, f"tail -n 20 {remains.name}/logs/*.log")
    return Verdict(RUNNING, where + remains.diagnoses, follow)


def _finished(remains: Remains) -> Verdict:
    command = remains.listing()
    if remains.saved:
        model = f"{remains.name}/{remains.saved.path.name}/actor"
        command = f"python -m hybridrl.model_merger merge --local_dir {model} --target_dir merged"
    return Verdict(FINISHED, f"it finished after step {remains.last_step}{remains.diagnoses}", command)


def _killed(remains: Remains) -> Verdict:
    """Judge a run that could not record its end."""
    where, before = f"{remains.place}{_restart(remains)}", [one.memory.get("oom_kills") for one in remains.faults]
    request = next((one.text for one in remains.faults if one.code == REQUESTED), "")
    kills, last = oom_kills(), max([remains.logged, *(one.at.timestamp() for one in remains.faults)])
    if psutil.boot_time() > last:
        return Verdict(MACHINE_RESTARTED, f"the machine was restarted or lost power {where}", remains.resume())
    if kills and before and before[0] is not None and kills > before[0]:
        cause = f"the driver was killed {where}; for lack of memory the kernel has killed {kills - before[0]} processes"
        return Verdict("host-memory", f"{cause} since the run began", remains.check())
    if (free := shutil.disk_usage(remains.directory).free) < FULL_BYTES:
        cause = f"the disk is full ({free} bytes are free), so the end {remains.place} could not be recorded"
        return Verdict("disk-full", cause, remains.with_fewer_checkpoints())
    by = f"after {request} and before its step was saved" if request else "by hand, by a scheduler or by a crash"
    return Verdict(KILLED, f"the driver was killed {where}, {by}: {FILE} has no end", remains.resume())


def _restart(remains: Remains) -> str:
    return (
        f" (the last healthy checkpoint is of step {remains.saved.step})" if remains.saved else " (nothing was saved)"
    )


def _shown(text: str) -> str:
    line = next(iter(text.splitlines()), "")
    return line if len(line) <= SHOWN else f"{line[:SHOWN]} ..."


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.doctor why",
        description="How a run is, or why it ended, and the command to continue with.",
        epilog="exit status: 0 it runs or has finished, 1 otherwise, 2 the command cannot be parsed",
        allow_abbrev=False,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the run's trainer.default_local_dir")
    parser.add_argument("--json", action="store_true", help="print code, cause and command as JSON")
    arguments = parser.parse_args(argv)
    verdict = diagnose(arguments.directory.expanduser().absolute())
    if arguments.json:
        print(json.dumps(asdict(verdict), indent=2))
    else:
        print(f"why:  {verdict.cause} [{verdict.code}]\nnext: {verdict.command}\n      ({PAGE}#{verdict.code})")
    return int(verdict.code not in WELL)
