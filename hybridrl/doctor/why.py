"""`python -m hybridrl.doctor why DIR`: how a run is or why it ended, in one sentence, and the command to continue with.

Reads what a run leaves in its directory, however it ended, and writes nothing. Every code has a section in
docs/errors.md.
"""

import contextlib
import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from hybridrl.checkpoint.store import Checkpoint, holder, list_checkpoints, saved_config
from hybridrl.config.values import value_of
from hybridrl.doctor import directory_parser
from hybridrl.runtime.guard import oom_kills
from hybridrl.tracking import read_metrics
from hybridrl.tracking.console import print_text
from hybridrl.tracking.faults import ACTOR, FILE, FINISHED, PAGE, REQUESTED, STOPPED, Fault, last_run, read_faults
from hybridrl.tracking.sink import STEP_SECONDS

WELL = {RUNNING := "running", FINISHED}
SILENT_SECONDS, SILENT_STEPS = 60.0, 5.0  # without a step: the greater of the seconds, and of so many times the median
FULL_BYTES = 1 << 20  # free, or fewer, on a disk that is full
SHOWN = 300  # characters of an error
ACTORS = "actor_rollout_ref"
Change = Callable[[dict[str, Any]], str]  # from configuration to an override
TRIED = re.compile(r"^(?:tried: |  )((?:[\w.]+=\S+ {0,2}(?:instead of \S+)?)+)", re.MULTILINE)  # with too little memory


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
        self.config, metrics = saved_config(directory), directory / "metrics.jsonl"
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
        last = self.metrics.get(self.last_step, {})
        held = [name.removeprefix("health/") for name, value in last.items() if name.startswith("health/") and value]
        return f"; {', '.join(held)} held at the last step (docs/health.md)" if held else ""

    @property
    def checkpoint(self) -> str:
        return f" (the last healthy checkpoint is of step {self.saved.step})" if self.saved else " (nothing was saved)"

    def resume(self, change: Change | None = None) -> str:
        """Return the command that continues the run, from its last checkpoint if there is one, with a change."""
        if not self.config:
            return "python -m hybridrl.main_ppo key=value ..., as before"
        words = [f"python -m hybridrl.{'main_ppo' if ACTORS in self.config else 'main_sft'} -cp {self.name} -cn config"]
        if self.saved and self.config["trainer"].get("resume_mode") != "auto":
            words.append("trainer.resume_mode=auto")
        return " ".join([*words, change(self.config)] if change else words)

    @property
    def blamed(self) -> str:
        """The process that the last record names, as its log file is named; empty: none."""
        named = ACTOR.search(self.faults[-1].text) if self.faults else None
        return f"{named[1]}-{named[2]}" if named else ""

    def check(self, otherwise: Change | None = None) -> str:
        """Return the command that checks the configuration, tries its reward, and plans its memory; of a supervised
        run, which the doctor does not know, that to continue with a change."""
        supervised = ACTORS not in self.config
        return self.resume(otherwise) if supervised else f"python -m hybridrl.doctor -cp {self.name} -cn config"

    def report(self) -> str:
        return f"python -m hybridrl.doctor report {self.name}"

    def log(self) -> str:
        return f"less +G {self.name}/logs/{self.blamed or '*'}.log"

    def listing(self) -> str:
        return f"python -m hybridrl.doctor checkpoints {self.name}"


def fewer_checkpoints(config: dict[str, Any]) -> str:
    return "trainer.max_actor_ckpt_to_keep=1"


def optimizer_on_host(config: dict[str, Any]) -> str:
    return "engine.fsdp_config.offload_policy=true"


def lower_rate(config: dict[str, Any]) -> str:
    key = f"{f'{ACTORS}.actor.' * (ACTORS in config)}optim.lr"
    try:
        return f"{key}={value_of(config, key) / 10:.2g}"
    except (KeyError, TypeError):  # a configuration that was edited
        return f"{key}=..."


# Code of an end -> what it means, and the command to continue with.
ENDS: dict[str, tuple[str, Callable[[Remains], str]]] = {
    "device-memory": ("a device ran out of memory", lambda run: run.check(optimizer_on_host)),
    "host-memory": ("the machine ran out of memory", Remains.check),
    "disk-full": ("the disk is full", lambda run: run.resume(fewer_checkpoints)),
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
    "unhealthy": ("a diagnosis stopped it", lambda run: run.resume(lower_rate)),
    "broken-updates": ("updates were not finite", lambda run: run.resume(lower_rate)),
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
        return Verdict("not-started", cause, "python -m hybridrl.doctor key=value ..., with the arguments of the run")
    end = remains.end
    if end is None:
        return _killed(remains)
    if end.code == FINISHED:
        return _finished(remains)
    if end.code == STOPPED:
        request = next((one.text for one in remains.faults if one.code == REQUESTED), end.text)
        return Verdict(STOPPED, f"{request} stopped it {remains.place}{remains.checkpoint}", remains.resume())
    if end.code == "rejected":
        command = "python -m hybridrl.doctor key=value ..., with the arguments of the run"
        return Verdict(end.code, f"configuration or data were rejected before the start: {_shown(end.text)}", command)
    meaning, command_of = ENDS.get(end.code, ENDS["unexpected"])
    tried = "; ".join(" ".join(settings.split()) for settings in TRIED.findall(end.text))
    cause = f"{meaning} {remains.place}: {_shown(end.text)}{f' (tried: {tried})' if tried else ''}"
    return Verdict(end.code, cause, command_of(remains))


def _living(remains: Remains) -> Verdict:
    now, follow = time.time(), f"tail -f {remains.name}/metrics.jsonl"
    if not remains.logged:
        seconds = now - (remains.began or now)
        return Verdict(RUNNING, f"{remains.user} has been starting it for {seconds:.0f} s", follow)
    times = [metrics[STEP_SECONDS] for metrics in list(remains.metrics.values())[-20:] if STEP_SECONDS in metrics]
    usual, silent = median(times) if times else 0.0, now - remains.logged
    where = f"{remains.user} did step {remains.last_step} {silent:.0f} s ago, and steps take {usual:.3g} s"
    if silent > max(SILENT_SECONDS, SILENT_STEPS * usual):
        return Verdict("silent", where, f"tail -n 20 {remains.name}/logs/*.log")
    return Verdict(RUNNING, where + remains.diagnoses, follow)


def _finished(remains: Remains) -> Verdict:
    command = remains.listing()
    if remains.saved:
        model = f"{remains.name}/{remains.saved.path.name}/actor"
        command = f"python -m hybridrl.model_merger merge --local_dir {model} --target_dir merged"
    return Verdict(FINISHED, f"it finished after step {remains.last_step}{remains.diagnoses}", command)


def _killed(remains: Remains) -> Verdict:
    """Judge a run that could not record its end."""
    where, before = f"{remains.place}{remains.checkpoint}", [one.memory.get("oom_kills") for one in remains.faults]
    request = next((one.text for one in remains.faults if one.code == REQUESTED), "")
    kills, last = oom_kills(), max([remains.logged, *(one.at.timestamp() for one in remains.faults)])
    if psutil.boot_time() > last:
        return Verdict("machine-restarted", f"the machine was restarted or lost power {where}", remains.resume())
    if kills and before and before[0] is not None and kills > before[0]:
        cause = f"the driver was killed {where}; for lack of memory the kernel has killed {kills - before[0]} processes"
        return Verdict("host-memory", f"{cause} since the run began", remains.check())
    if (free := shutil.disk_usage(remains.directory).free) < FULL_BYTES:
        cause = f"the disk is full ({free} bytes are free), so the end {remains.place} could not be recorded"
        return Verdict("disk-full", cause, remains.resume(fewer_checkpoints))
    by = f"after {request} and before its step was saved" if request else "by hand, by a scheduler or by a crash"
    return Verdict("killed", f"the driver was killed {where}, {by}: {FILE} has no end", remains.resume())


def _shown(text: str) -> str:
    line = next(iter(text.splitlines()), "")
    return line if len(line) <= SHOWN else f"{line[:SHOWN]} ..."


def main(argv: list[str]) -> int:
    parser = directory_parser(
        "why",
        "How a run is, or why it ended, and the command to continue with.",
        epilog="exit status: 0 it runs or has finished, 1 otherwise, 2 the command cannot be parsed",
        as_json="code, cause and command",
    )
    arguments = parser.parse_args(argv)
    with contextlib.redirect_stdout(sys.stderr):  # standard output has the verdict only
        verdict = diagnose(arguments.directory)
    if arguments.json:
        print(json.dumps(asdict(verdict), indent=2))
    else:
        print_text(f"why:  {verdict.cause} [{verdict.code}]\nnext: {verdict.command}\n      ({PAGE}#{verdict.code})")
    return int(verdict.code not in WELL)
