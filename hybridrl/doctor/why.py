"""`hybridrl why RUN`: how a run is or why it ended, in one sentence, and the command to continue with.

Reads what a run leaves in its directory, however it ended, and writes nothing. Every code has a section in
docs/errors.md.
"""

import argparse
import re
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import psutil

from hybridrl import project_file
from hybridrl.config.values import value_of
from hybridrl.doctor import Result
from hybridrl.runs.directory import ACTORS, RunDirectory
from hybridrl.runtime.guard import oom_kills
from hybridrl.tracking.faults import ACTOR, FILE, FINISHED, PAGE, REQUESTED, STOPPED
from hybridrl.tracking.secrets import mask_text, remember
from hybridrl.tracking.sink import STEP_SECONDS

WELL = {RUNNING := "running", FINISHED}
SILENT_SECONDS, SILENT_STEPS = 60.0, 5.0  # without a step: the greater of the seconds and this multiple of the median
FULL_BYTES = 1 << 20  # free, or fewer, on a disk that is full
SHOWN = 300  # characters of an error
REJECTED = "hybridrl doctor key=value ..., with the arguments of the run"
FEWER_CHECKPOINTS = "trainer.max_actor_ckpt_to_keep=1"
OPTIMIZER_ON_HOST = "engine.fsdp_config.offload_policy=true"
TRIED = re.compile(r"^(?:tried: |  )((?:[\w.]+=\S+ {0,2}(?:instead of \S+)?)+)", re.MULTILINE)  # with too little memory


@dataclass(frozen=True)
class Verdict:
    """The state of a run and its reason: a stable code, one sentence, and the one command to continue with."""

    code: str
    cause: str
    command: str


def check_command(run: RunDirectory, otherwise: str = "") -> str:
    """Return the command that checks the configuration, tries its reward, and plans its memory. The doctor does not
    know supervised runs: theirs is the command to continue with a change."""
    command = f"hybridrl doctor -cp {named(run)} -cn config"
    return command if ACTORS in run.config else run.resume_command(otherwise)


def bundle_command(run: RunDirectory) -> str:
    return f"hybridrl bundle {named(run)}"


def log_command(run: RunDirectory) -> str:
    """Return the command to show the log of the last record's process."""
    blamed = ACTOR.search(run.last_run[-1].text) if run.last_run else None
    return f"less +G {named(run)}/logs/{f'{blamed[1]}-{blamed[2]}' if blamed else '*'}.log"


def listing(run: RunDirectory) -> str:
    return f"hybridrl checkpoints {named(run)}"


def named(run: RunDirectory) -> str:
    return shlex.quote(str(run.path))


def lower_rate(run: RunDirectory) -> str:
    """Return the command that continues the run with a tenth of its learning rate."""
    key = f"{f'{ACTORS}.actor.' * (not run.supervised)}optim.lr"
    try:
        return run.resume_command(f"{key}={value_of(run.config, key) / 10:.2g}")
    except (KeyError, TypeError):  # a configuration that was edited
        return run.resume_command(f"{key}=...")


# Code of an end -> what it means, and the command to continue with.
ENDS: dict[str, tuple[str, Callable[[RunDirectory], str]]] = {
    "device-memory": ("a device ran out of memory", lambda run: check_command(run, OPTIMIZER_ON_HOST)),
    "host-memory": ("the machine ran out of memory", check_command),
    "disk-full": ("the disk is full", lambda run: run.resume_command(FEWER_CHECKPOINTS)),
    "save-failed": ("a checkpoint could not be saved", RunDirectory.resume_command),
    "checkpoint-damaged": ("the checkpoint to resume from is damaged", listing),
    "worker-died": ("a process of the run died", RunDirectory.resume_command),
    "worker-failed": ("a worker failed", bundle_command),
    "no-response": ("a process hung", RunDirectory.resume_command),
    "engine-start": ("a rollout engine could not start", log_command),
    "rollout-failed": ("responses could not be sampled", log_command),
    "reward-faults": ("responses could not be scored", check_command),
    "no-signal": ("there was nothing to learn from", check_command),
    "nothing-to-learn-from": ("there was nothing to learn from", check_command),
    "unhealthy": ("a diagnosis stopped it", lower_rate),
    "broken-updates": ("updates were not finite", lower_rate),
    "stale-weights": ("an engine did not compute with the trainer's weights", bundle_command),
    "disagreement": ("engine and trainer compute different log-probs", bundle_command),
    "wrong-mode": ("the program is at fault", bundle_command),
    "unexpected": ("the program is at fault", bundle_command),
}


def diagnose(directory: Path) -> Verdict:
    """Return how the run of a directory is, or why it ended."""
    run = RunDirectory(directory)
    if run.user:
        return _living(run)
    if not run.faults and not run.steps:
        cause = f"no run has started in {directory}: if one was to, its configuration was rejected"
        return Verdict("not-started", cause, REJECTED)
    end = run.end
    if end is None:
        return _killed(run)
    if end.code == FINISHED:
        return _finished(run)
    if end.code == STOPPED:
        return Verdict(
            STOPPED, f"{_request(run) or end.text} stopped it {run.place}{_saved(run)}", run.resume_command()
        )
    if end.code == "rejected":
        cause = f"configuration or data were rejected before the start: {_shown(end.text)}"
        return Verdict(end.code, cause, REJECTED)
    meaning, command_of = ENDS.get(end.code, ENDS["unexpected"])
    tried = "; ".join(" ".join(settings.split()) for settings in TRIED.findall(end.text))
    cause = f"{meaning} {run.place}: {_shown(end.text)}{f' (tried: {tried})' if tried else ''}"
    return Verdict(end.code, cause, command_of(run))


def _living(run: RunDirectory) -> Verdict:
    now, follow = time.time(), f"tail -f {named(run)}/metrics.jsonl"
    if not run.logged:
        return Verdict(RUNNING, f"{run.user} has been starting it for {now - (run.began or now):.0f} s", follow)
    times = [metrics[STEP_SECONDS] for metrics in list(run.steps.values())[-20:] if STEP_SECONDS in metrics]
    usual, silent = median(times) if times else 0.0, now - run.logged
    where = f"{run.user} did step {run.last_step} {silent:.0f} s ago, and steps take {usual:.3g} s"
    if silent > max(SILENT_SECONDS, SILENT_STEPS * usual):
        return Verdict("silent", where, f"tail -n 20 {named(run)}/logs/*.log")
    return Verdict(RUNNING, where + _diagnoses(run), follow)


def _finished(run: RunDirectory) -> Verdict:
    command = listing(run)
    if run.saved:
        model = f"{named(run)}/{run.saved.path.name}/actor"
        command = f"hybridrl merge --local_dir {model} --target_dir merged"
    return Verdict(FINISHED, f"it finished after step {run.last_step}{_diagnoses(run)}", command)


def _killed(run: RunDirectory) -> Verdict:
    """Judge a run that could not record its end."""
    where, before = f"{run.place}{_saved(run)}", [record.memory.get("oom_kills") for record in run.last_run]
    kills, last = oom_kills(), max([run.logged, *(record.at.timestamp() for record in run.last_run)])
    if psutil.boot_time() > last:
        return Verdict("machine-restarted", f"the machine was restarted or lost power {where}", run.resume_command())
    if kills and before and before[0] is not None and kills > before[0]:
        cause = f"the driver was killed {where}; for lack of memory the kernel has killed {kills - before[0]} processes"
        return Verdict("host-memory", f"{cause} since the run began", check_command(run))
    if (free := shutil.disk_usage(run.path).free) < FULL_BYTES:
        cause = f"the disk is full ({free} bytes are free), so the end {run.place} could not be recorded"
        return Verdict("disk-full", cause, run.resume_command(FEWER_CHECKPOINTS))
    request = _request(run)
    by = f"after {request} and before its step was saved" if request else "by hand, by a scheduler or by a crash"
    return Verdict("killed", f"the driver was killed {where}, {by}: {FILE} has no end", run.resume_command())


def _request(run: RunDirectory) -> str:
    """Return who requested the run to stop; empty: nobody."""
    return next((record.text for record in run.last_run if record.code == REQUESTED), "")


def _saved(run: RunDirectory) -> str:
    lacks = f": {run.saved.lacks}, so no run resumes from it" if run.saved and run.saved.lacks else ""
    return f" (the last healthy checkpoint is of step {run.saved.step}{lacks})" if run.saved else " (nothing was saved)"


def _diagnoses(run: RunDirectory) -> str:
    """Return what health rules report of the last step, as the continuation of a sentence."""
    codes = [code for code, steps in run.held.items() if steps[-1] == run.last_step]
    return f"; {', '.join(codes)} held at the last step ({project_file('docs/health.md')})" if codes else ""


def _shown(text: str) -> str:
    line = next(iter(text.splitlines()), "")
    return line if len(line) <= SHOWN else f"{line[:SHOWN]} ..."


def run(options: argparse.Namespace) -> Result:
    remember(RunDirectory(options.directory, lambda *_: None).config)
    verdict = diagnose(options.directory)
    verdict = replace(verdict, cause=mask_text(verdict.cause), command=mask_text(verdict.command))
    text = (
        f"why:  {verdict.cause} [{verdict.code}]\nnext: {verdict.command}\n      ({project_file(PAGE)}#{verdict.code})"
    )
    return Result(asdict(verdict), [text], failed=verdict.code not in WELL)
