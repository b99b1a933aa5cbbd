"""`hybridrl doctor selftest-resume key=value ...`: kills a short run at random moments, restarts it until it
is done, and compares it bit for bit with a run that was not killed. Reports how many complete steps each kill cost."""

import argparse
import contextlib
import json
import math
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from hybridrl.checkpoint.read import read_shards
from hybridrl.config.files import SHARDS
from hybridrl.doctor import Result, resolve
from hybridrl.tracking.console import info
from hybridrl.tracking.records import open_records, record_files

SHOWN = 5
POLL_SECONDS = 0.005
EXIT_SECONDS = 30.0
MOST_LOST = 1  # complete steps: a kill can come between the end of a step and that of its checkpoint
RESUMED = re.compile(r"resuming after step (\d+)|^step (0) ", re.MULTILINE)

# Saving and publishing take a fraction of a step: a kill waits for their files, or it would never coincide with one.
MOMENTS = {"in the step": "", "while it is saved": "*.writing", "while it is published": "*.writing/manifest.json"}
ON_DISK = "after its last shard is on disk"
VICTIMS = {
    "the driver": "",
    "a train worker": "ray::TrainWorker",
    "a rollout server": "ray::RolloutServer",
    "the raylet": "raylet/raylet",
    "the fork server": "forkserver.py serve",
    "a scorer": "hybridrl.rewards.process",
    "a process of episodes": "ray::EpisodeWorker",
    "everything": "",
}
# Metrics of clocks, memory and lost engines, which may differ.
MACHINE_METRICS = re.compile(r"^(timing|perf/|rollout/)|\bagent_loop/|\btools/[^/]+/seconds_p\d+$")


def run(options: argparse.Namespace) -> Result:
    config, count = resolve(options).accept(report=info), options.kills
    directory = Path(options.dir or tempfile.mkdtemp(prefix="selftest-resume-")).absolute()
    info(f"a run of {options.steps} steps, and the same with {count} kills, in {directory}")
    words = ["--config-path", str(options.config_path), "--config-name", options.config_name, *options.overrides]
    test = Selftest(words, config.critic.enable, options.steps, directory)
    try:
        test.run_unbroken()
        kills = draw_kills(random.Random(options.seed), count, options.steps, test.step_seconds)
        problems = test.run_killed(directory / "killed", kills)
    except RunFailed as failure:
        return Result({"failed": str(failure)}, [f"failed: {failure}"], failed=True)
    except KeyboardInterrupt:
        info(f"the runs so far are in {directory}")
        raise
    lines = [f"complete steps that were trained again after a kill: {', '.join(map(str, test.lost)) or 'none'}"]
    if problems:
        lines += problems[:SHOWN] + [f"... {len(problems) - SHOWN} more"] * (len(problems) > SHOWN)
        fix = "" if config.trainer.deterministic else "; try trainer.deterministic=true"
        lines.append(
            f"failed: the killed run differs from the unbroken one or lost steps, both are in {directory}{fix}"
        )
    else:
        lines.append(f"{count} kills, and the run ended as the unbroken one, bit for bit; no process was left running")
        if not options.dir:
            shutil.rmtree(directory)
    return Result({"kills": test.kills, "lost": test.lost, "problems": problems}, lines, failed=bool(problems))


class RunFailed(RuntimeError):
    """A run that was not killed did not finish."""


@dataclass
class Selftest:
    """Runs of main_ppo with these arguments for `steps` steps; the unbroken one is in `directory/whole`."""

    arguments: list[str]
    critic: bool
    steps: int
    directory: Path

    def run_unbroken(self) -> None:
        began = time.monotonic()
        self.unbroken = self._start(self.directory / "whole")
        if self.unbroken.finish():
            raise self.unbroken.failure()
        info(f"the unbroken run took {time.monotonic() - began:.0f} s")
        seconds = [record["timing_s/step"] for record in self.unbroken.records() if "timing_s/step" in record]
        self.step_seconds = statistics.median(seconds)

    def run_killed(self, directory: Path, kills: Sequence["Kill"]) -> list[str]:
        """Kill a run repeatedly, each time restarting it. Returns its differences, the steps lost beyond what is
        promised, and the processes left running."""
        self.kills: list[str] = []
        self.lost: list[int] = []
        run = self._start(directory)
        for number, kill in enumerate(kills, start=1):
            done = False
            while not done and not run.reach(kill):
                done = self.finish(run) == 0
                run = run if done else run.restart()
            late = "came too late: the run was done"
            self.kills.append(f"kill {number} of {len(kills)}" + (f" {late}" if done else f": {kill}"))
            info(self.kills[-1])
            if not done:
                run.kill(kill.victim)
        while self.finish(run) != 0:
            run = run.restart()
        lost = [f"a kill cost {steps} complete steps" for steps in self.lost if steps > MOST_LOST]
        return self.differences(directory) + lost + run.left_running()

    def differences(self, directory: Path) -> list[str]:
        """Return how a run that was killed differs from the unbroken one."""
        return differences(self.unbroken.directory, directory, self.steps)

    def finish(self, run: "SelftestRun") -> int:
        """Wait for the end of a run, and record what it had to train again. Returns the exit status."""
        status, resumed_after = run.finish(), run.resumed_after()
        if run.reached is not None and resumed_after is not None:
            self.lost.append(max(run.reached - resumed_after, 0))
        return status

    def _start(self, directory: Path) -> "SelftestRun":
        """Start the user's run in another directory, with every step saved and every sample written."""
        contents, models = "[model,optimizer,extra]", ["actor_rollout_ref.actor", *["critic"] * self.critic]
        values = {
            "trainer.default_local_dir": directory,
            "trainer.total_training_steps": self.steps,
            "trainer.save_freq": 1,
            "trainer.max_actor_ckpt_to_keep": 2,
            "trainer.resume_mode": "auto",
            "trainer.logger": "[console]",
            "trainer.rollout_data_dir": directory / "samples",
            "trainer.val_before_train": False,
        } | {f"{model}.checkpoint.save_contents": contents for model in models}
        overrides = [f"{key}={value}" for key, value in values.items()]
        return SelftestRun([sys.executable, "-m", "hybridrl.main_ppo", *self.arguments, *overrides], directory)


# -- kills -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """Kills `victim` `seconds` into a moment that follows the log line of step `after`."""

    after: int
    moment: str
    seconds: float
    victim: str

    def __str__(self) -> str:
        return f"{self.victim}, after step {self.after}, {self.moment} ({self.seconds:.2f} s in)"


def draw_kills(rng: random.Random, count: int, steps: int, step_seconds: float) -> list[Kill]:
    """Sample kills of a run of `steps` steps, in order, with as few as possible in one step."""
    kills = []
    for after in sorted(rng.sample([*range(steps)] * math.ceil(count / steps), count)):
        moment = rng.choice(["in the step", *MOMENTS])  # half of them
        longest = step_seconds / 20 if MOMENTS[moment] else step_seconds
        kills.append(Kill(after, moment, rng.uniform(0, longest), rng.choice(list(VICTIMS))))
    return kills


class SelftestRun:
    """A run in its own processes; its output is appended to `<directory>.log`."""

    def __init__(
        self, command: list[str], directory: Path, left_running: Sequence[str] = (), reached: int | None = None
    ) -> None:
        self.command, self.directory, self.log = command, directory, directory.with_suffix(".log")
        self.reached = reached  # the last step of the run before this one
        self.before = left_running  # by earlier runs in the directory
        directory.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.logged = self.log.stat().st_size  # by earlier runs
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.processes: set[psutil.Process] = set()  # existing at the last kill; empty if it was not killed

    def restart(self) -> "SelftestRun":
        """Start a run that was killed again. Raises RunFailed for one that ended by itself."""
        if not self.processes:
            raise self.failure()
        return SelftestRun(self.command, self.directory, self.left_running(), self.last_step())

    def resumed_after(self) -> int | None:
        """Return the step after which this ended run resumed; None if it was killed before it resumed."""
        match = RESUMED.search(self.log.read_bytes()[self.logged :].decode(errors="replace"))
        return int(match[1] or match[2]) if match else None

    def finish(self) -> int:
        """Wait for the end. Returns the exit status."""
        return self.process.wait()

    def failure(self) -> RunFailed:
        """Describe how a run that was not killed ended."""
        tail = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-10:])
        return RunFailed(f"a run that was not killed ended with exit status {self.finish()}:\n{tail}")

    def reach(self, kill: Kill) -> bool:
        """Wait for the moment of a kill. Returns False if the run ended before."""
        while self.last_step() < kill.after or not self._is_moment(kill):
            if self.process.poll() is not None:
                return False
            time.sleep(POLL_SECONDS)
        time.sleep(kill.seconds)
        return self.process.poll() is None

    def _is_moment(self, kill: Kill) -> bool:
        if kill.moment == ON_DISK:
            places = (f".global_step_{kill.after}.writing", f"global_step_{kill.after}")
            return any((self.directory / place / "actor" / SHARDS).is_file() for place in places)
        pattern = MOMENTS[kill.moment]
        return not pattern or any(self.directory.glob(pattern))

    def kill(self, victim: str) -> None:
        """Kill the process; the driver if there is none of its kind."""
        guard = psutil.Process(self.process.pid)
        self.processes |= {guard, *guard.children(recursive=True)}
        targets = [guard, *self.processes] if victim == "everything" else []
        if name := VICTIMS[victim]:
            for process in self.processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    targets += [process] * (name in " ".join(process.cmdline()))
            targets = targets[:1]
        # The driver is the guard's first child; keepers start later.
        for process in targets or sorted(guard.children(), key=psutil.Process.create_time)[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended at this moment
                process.kill()

    def left_running(self) -> list[str]:
        """Return the processes that outlived this run and those before it."""
        _, alive = psutil.wait_procs(self.processes, timeout=EXIT_SECONDS)
        zombie = psutil.STATUS_ZOMBIE
        return [*self.before, *(f"left running: {process}" for process in alive if process.status() != zombie)]

    def last_step(self) -> int:
        """Return the last step that was logged; -1 before the start-up is complete."""
        return max((record["step"] for record in self.records()), default=-1)

    def records(self) -> list[dict[str, float]]:
        file = self.directory / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be incomplete


# -- comparing runs ----------------------------------------------------------------------------------------------------


def differences(expected: Path, actual: Path, last_step: int) -> list[str]:
    """Compare metrics, samples, and the last step's weights and moments bit for bit. Returns a line per difference."""
    left, right = _metrics(expected), _metrics(actual)
    lines = [
        f"step {step}: {name} is {right.get((step, name))}, not {left.get((step, name))}"
        for step, name in sorted(left.keys() | right.keys())
        if left.get((step, name)) != right.get((step, name))
    ]
    files = [record_files(run / "samples") for run in (expected, actual)]
    samples = [{step: _samples(file) for step, file in files_of_run.items()} for files_of_run in files]
    steps = sorted(samples[0].keys() | samples[1].keys())
    lines += [f"step {step}: other samples" for step in steps if samples[0].get(step) != samples[1].get(step)]
    checkpoint = f"global_step_{last_step}"
    models = sorted(path.parent.name for path in expected.glob(f"{checkpoint}/*/{SHARDS}"))
    assert models, f"{expected / checkpoint} holds no model"
    for model in models:
        there = actual / checkpoint / model
        if not (there / SHARDS).is_file():
            lines.append(f"{there}: nothing was saved")
            continue
        reference, other = (read_shards(run / checkpoint / model, section="") for run in (expected, actual))
        for name in sorted(reference.meta.keys() | other.meta.keys()):
            both = name in reference.meta and name in other.meta
            if not both or not torch.equal(_bits(reference.read(name)), _bits(other.read(name))):
                lines.append(f"{model}: {name} differs")
    return lines


def _metrics(directory: Path) -> dict[tuple[int, str], float]:
    """Every value by step and name; a step that was logged twice has its last values."""
    records = map(json.loads, (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {
        (record["step"], name): value
        for record in records
        for name, value in record.items()
        if not MACHINE_METRICS.search(name)
    }


def _samples(file: Path) -> list[Any]:
    """Return the rows of a file of samples without the seconds of their turns and calls."""
    with open_records(file) as lines:
        rows = [json.loads(line) for line in lines]
    for turn in (turn for row in rows for turn in row.get("turns", ())):
        for timed in (turn, *turn["calls"]):
            del timed["seconds"]
    return rows


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Compare bytes: 0.0 and -0.0 differ, equal NaNs do not."""
    return tensor.reshape(-1).view(torch.uint8)
