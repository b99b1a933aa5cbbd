"""`python -m hybridrl.doctor selftest-resume key=value ...`: kills a short run at random moments, restarts it until it
is done, and compares it bit for bit with a run that was not killed."""

import argparse
import contextlib
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import psutil
import torch

from hybridrl.checkpoint.read import read_shards
from hybridrl.config import ConfigError, load_ppo_config
from hybridrl.config.compose import CONF
from hybridrl.config.files import SHARDS
from hybridrl.runtime.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REJECTED
from hybridrl.tracking.console import info

SHOWN = 5
POLL_SECONDS = 0.005
EXIT_SECONDS = 30.0

# Saving and publishing take a fraction of a step: a kill waits for their files, or it would never coincide with one.
MOMENTS = {"in the step": "", "while it is saved": "*.writing", "while it is published": "*.writing/manifest.json"}
VICTIMS = {
    "the driver": "",
    "a train worker": "ray::TrainWorker",
    "a rollout server": "ray::RolloutServer",
    "an engine": "EngineCore",
    "a scorer": "hybridrl.rewards.process",
    "everything": "",
}
# Metrics of clocks, memory and lost engines, which may differ.
MACHINE_METRICS = ("timing", "perf/", "rollout/")


def main(argv: list[str]) -> int:
    arguments = _parse(argv)
    try:
        source = {"config_name": arguments.config_name, "config_dir": arguments.config_path}
        config = load_ppo_config(arguments.overrides, report=info, **source)
    except ConfigError as error:
        info(f"error: {error}")
        return EXIT_REJECTED
    directory = Path(arguments.dir or tempfile.mkdtemp(prefix="selftest-resume-")).absolute()
    info(f"a run of {arguments.steps} steps, and the same with {arguments.kills} kills, in {directory}")
    file = ["--config-path", str(arguments.config_path), "--config-name", arguments.config_name]
    test = Selftest([*file, *arguments.overrides], config.critic.enable, arguments.steps, directory)
    try:
        test.run_unbroken()
        problems = test.run_killed(directory / "killed", random.Random(arguments.seed), arguments.kills)
    except RunFailed as failure:
        info(f"failed: {failure}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        info(f"stopped; the runs so far are in {directory}")
        return EXIT_INTERRUPTED
    if problems:
        info("\n".join(problems[:SHOWN] + [f"... {len(problems) - SHOWN} more"] * (len(problems) > SHOWN)))
        fix = "" if config.trainer.deterministic else "; try trainer.deterministic=true"
        info(f"failed: the killed run differs from the unbroken one, both are in {directory}{fix}")
        return EXIT_FAILED
    info(f"{arguments.kills} kills, and the run ended as the unbroken one, bit for bit; no process was left running")
    if not arguments.dir:
        shutil.rmtree(directory)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hybridrl.doctor selftest-resume", description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="the run's keys, as for main_ppo")
    parser.add_argument("-cp", "--config-path", type=Path, default=CONF, metavar="DIR", help="as for main_ppo")
    parser.add_argument("-cn", "--config-name", default="ppo_trainer", metavar="NAME", help="as for main_ppo")
    parser.add_argument("--steps", type=int, default=4, help="length of the run")
    parser.add_argument("--kills", type=int, default=3, help="number of kills")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and processes of the kills")
    parser.add_argument(
        "--dir", help="where both runs are kept; default: a temporary directory, deleted if the test passes"
    )
    return parser.parse_intermixed_args(argv)


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

    def run_killed(self, directory: Path, rng: random.Random, kills: int) -> list[str]:
        """Kill a run repeatedly, each time restarting it. Returns its differences and the processes left running."""
        self.left_running: list[str] = []
        self.kills: list[str] = []
        run = self._start(directory)
        for number, kill in enumerate(draw_kills(rng, kills, self.steps, self.step_seconds), start=1):
            run = self._kill(run, kill, f"kill {number} of {kills}")
        while run.finish() != 0:
            run = self._restart(run)
        self._record_left_running(run)
        return differences(self.unbroken.directory, directory, self.steps) + self.left_running

    def _kill(self, run: "Run", kill: "Kill", number: str) -> "Run":
        done = False
        while not done and not run.reach(kill):
            done = run.finish() == 0
            run = run if done else self._restart(run)
        self.kills.append(f"{number} came too late: the run was done" if done else f"{number}: {kill}")
        info(self.kills[-1])
        if not done:
            run.kill(kill.victim)
        return run

    def _restart(self, run: "Run") -> "Run":
        if not run.processes:
            raise run.failure()
        self._record_left_running(run)
        return self._start(run.directory)

    def _record_left_running(self, run: "Run") -> None:
        self.left_running += [f"left running: {process}" for process in run.left_running()]

    def _start(self, directory: Path) -> "Run":
        """Start the user's run in another directory, with every step saved and every sample written."""
        contents = "[model,optimizer,extra]"
        values = {
            "trainer.default_local_dir": directory,
            "trainer.total_training_steps": self.steps,
            "trainer.save_freq": 1,
            "trainer.max_actor_ckpt_to_keep": 2,
            "trainer.resume_mode": "auto",
            "trainer.logger": "[console]",
            "trainer.rollout_data_dir": directory / "samples",
            "trainer.val_before_train": False,
            "actor_rollout_ref.actor.checkpoint.save_contents": contents,
        }
        if self.critic:
            values["critic.checkpoint.save_contents"] = contents
        overrides = [f"{key}={value}" for key, value in values.items()]
        return Run([sys.executable, "-m", "hybridrl.main_ppo", *self.arguments, *overrides], directory)


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


class Run:
    """A run in its own processes; its output is appended to `<directory>.log`."""

    def __init__(self, command: list[str], directory: Path) -> None:
        self.directory, self.log = directory, directory.with_suffix(".log")
        directory.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.processes: set[psutil.Process] = set()  # that existed at the last kill; empty if it was not killed

    def finish(self) -> int:
        """Wait for the end. Returns the exit status."""
        return self.process.wait()

    def failure(self) -> RunFailed:
        """Describe how a run that was not killed ended."""
        tail = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-10:])
        return RunFailed(f"a run that was not killed ended with exit status {self.finish()}:\n{tail}")

    def reach(self, kill: Kill) -> bool:
        """Wait for the moment of a kill. Returns False if the run ended before."""
        pattern = MOMENTS[kill.moment]
        while self.last_step() < kill.after or (pattern and not any(self.directory.glob(pattern))):
            if self.process.poll() is not None:
                return False
            time.sleep(POLL_SECONDS)
        time.sleep(kill.seconds)
        return self.process.poll() is None

    def kill(self, victim: str) -> None:
        """Kill the process; the driver if there is none of its kind."""
        guard = psutil.Process(self.process.pid)
        self.processes |= {guard, *guard.children(recursive=True)}
        if victim == "everything":
            targets = [guard, *self.processes]
        else:
            name = VICTIMS[victim]
            targets = [process for process in self.processes if name and name in _command_line(process)][:1]
        # The driver is the guard's first child; keepers start later.
        for process in targets or sorted(guard.children(), key=psutil.Process.create_time)[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended at this moment
                process.kill()

    def left_running(self) -> list[psutil.Process]:
        """Return the processes that outlived the run."""
        _, alive = psutil.wait_procs(self.processes, timeout=EXIT_SECONDS)
        return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]

    def last_step(self) -> int:
        """Return the last step that was logged; -1 before the start-up is complete."""
        return max((record["step"] for record in self.records()), default=-1)

    def records(self) -> list[dict[str, float]]:
        file = self.directory / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be incomplete


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


# -- comparing runs ----------------------------------------------------------------------------------------------------


def differences(expected: Path, actual: Path, last_step: int) -> list[str]:
    """Compare metrics, samples, and the last step's weights and moments bit for bit. Returns a line per difference."""
    left, right = _metrics(expected), _metrics(actual)
    lines = [
        f"step {step}: {name} is {right.get((step, name))}, not {left.get((step, name))}"
        for step, name in sorted(left.keys() | right.keys())
        if left.get((step, name)) != right.get((step, name))
    ]
    files = ({file.name: file.read_bytes() for file in run.glob("samples/*.jsonl")} for run in (expected, actual))
    left_files, right_files = files
    names = sorted(left_files.keys() | right_files.keys())
    lines += [f"{name}: other samples" for name in names if left_files.get(name) != right_files.get(name)]
    checkpoint = f"global_step_{last_step}"
    models = sorted(path.parent.name for path in expected.glob(f"{checkpoint}/*/{SHARDS}"))
    assert models, f"{expected / checkpoint} holds no model"
    for model in models:
        lines += _model_differences(expected / checkpoint / model, actual / checkpoint / model)
    return lines


def _metrics(directory: Path) -> dict[tuple[int, str], float]:
    """Every value by step and name; a step that was logged twice has its last values."""
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    named = chain.from_iterable(((record["step"], name, value) for name, value in record.items()) for record in records)
    return {(step, name): value for step, name, value in named if not name.startswith(MACHINE_METRICS)}


def _model_differences(expected: Path, actual: Path) -> Iterator[str]:
    if not (actual / SHARDS).is_file():
        yield f"{actual}: nothing was saved"
        return
    left, right = read_shards(expected, section=""), read_shards(actual, section="")
    for name in sorted(left.meta.keys() | right.meta.keys()):
        same = name in left.meta and name in right.meta and torch.equal(_bits(left.read(name)), _bits(right.read(name)))
        if not same:
            yield f"{expected.name}: {name} differs"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Compare bytes: 0.0 and -0.0 differ, equal NaNs do not."""
    return tensor.reshape(-1).view(torch.uint8)
