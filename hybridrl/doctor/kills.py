"""A training run as its killer sees it: processes, files that appear, and what is left when it is gone."""

import contextlib
import json
import math
import random
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

POLL_SECONDS = 0.005
GONE_SECONDS = 30.0

# Saving and publishing take a fraction of a step: a kill waits for them, or it would never hit one.
MOMENTS = {"in the step": "", "while it is saved": "*.writing", "while it is published": "*.writing/manifest.json"}
VICTIMS = {
    "the driver": "",
    "a train worker": "ray::TrainWorker",
    "a rollout server": "ray::RolloutServer",
    "an engine": "EngineCore",
    "a scorer": "hybridrl.rewards.worker",
    "everything": "",
}


@dataclass(frozen=True)
class Kill:
    """Which process is killed when: `seconds` into a moment after a step was told of."""

    after: int
    moment: str
    seconds: float
    victim: str

    def __str__(self) -> str:
        return f"{self.victim}, after step {self.after}, {self.moment} ({self.seconds:.2f} s in)"


def draw_kills(draw: random.Random, count: int, steps: int, seconds_a_step: float) -> list[Kill]:
    """Random kills of a run of so many steps, in the order in which they come."""
    kills = []
    places = [*range(steps)] * math.ceil(count / steps)  # as few as can be in one step
    for after in sorted(draw.sample(places, count)):
        moment = draw.choice(["in the step", *MOMENTS])  # half of them
        longest = seconds_a_step if not MOMENTS[moment] else seconds_a_step / 20
        kills.append(Kill(after, moment, draw.uniform(0, longest), draw.choice(list(VICTIMS))))
    return kills


class Run:
    """A run in processes of its own; what it prints is appended to `<directory>.log`."""

    def __init__(self, command: list[str], directory: Path) -> None:
        self.directory, self.log = directory, directory.with_suffix(".log")
        directory.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.seen: set[psutil.Process] = set()  # when it was last killed

    @property
    def killed(self) -> bool:
        return bool(self.seen)

    def finish(self) -> int:
        """Wait for the end; returns the exit status."""
        return self.process.wait()

    def reach(self, kill: Kill) -> bool:
        """Wait for a kill's moment; False: the run ended before it."""
        pattern = MOMENTS[kill.moment]
        while self.last_step() < kill.after or (pattern and not any(self.directory.glob(pattern))):
            if self.process.poll() is not None:
                return False
            time.sleep(POLL_SECONDS)
        time.sleep(kill.seconds)
        return self.process.poll() is None

    def suffer(self, kill: Kill) -> None:
        """Kill the process that is meant; where there is none of its kind, the driver."""
        guard = psutil.Process(self.process.pid)
        self.seen |= {guard, *guard.children(recursive=True)}
        if kill.victim == "everything":
            victims = [guard, *self.seen]
        else:
            name = VICTIMS[kill.victim]
            victims = [process for process in self.seen if name and name in _command_line(process)][:1]
        # The driver is the first of the guard's children; keepers come later.
        for process in victims or sorted(guard.children(), key=psutil.Process.create_time)[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself in this moment
                process.kill()

    def left_running(self) -> list[psutil.Process]:
        """Processes that have outlived the run."""
        _, alive = psutil.wait_procs(self.seen, timeout=GONE_SECONDS)
        return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]

    def last_step(self) -> int:
        """The last step that was told of; -1 before the start-up is done."""
        steps = [record["step"] for record in self.records()]
        return max(steps, default=-1)

    def records(self) -> list[dict[str, float]]:
        file = self.directory / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be half written

    def last_words(self) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-10:])


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
