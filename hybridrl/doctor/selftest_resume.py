"""`python -m hybridrl.doctor selftest-resume key=value ...`: a short run of one's own configuration is killed at random
moments and started again until it is done, and then compared with one that nobody killed, bit for bit."""

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hybridrl.config import ConfigError, load_ppo_config
from hybridrl.config.compose import CONF
from hybridrl.doctor.kills import Kill, Run, draw_kills
from hybridrl.doctor.sameness import differences
from hybridrl.runtime.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED
from hybridrl.tracking.log import info

SHOWN = 5


class RunFailed(RuntimeError):
    """A run that nobody killed did not finish."""


def main(argv: list[str]) -> int:
    arguments = _parse(argv)
    try:
        place = {"config_name": arguments.config_name, "config_dir": arguments.config_path}
        config = load_ppo_config(arguments.overrides, note=info, **place)
    except ConfigError as error:
        info(f"refused {error}")
        return EXIT_REFUSED
    directory = Path(arguments.dir or tempfile.mkdtemp(prefix="selftest-resume-")).absolute()
    info(f"a run of {arguments.steps} steps, and the same with {arguments.kills} kills, in {directory}")
    file = ["--config-path", str(arguments.config_path), "--config-name", arguments.config_name]
    test = Selftest([*file, *arguments.overrides], config.critic.enable, arguments.steps, directory)
    try:
        test.run_unbroken()
        found = test.run_killed(directory / "killed", random.Random(arguments.seed), arguments.kills)
    except RunFailed as failure:
        info(f"failed {failure}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        info(f"stopped; the runs so far are in {directory}")
        return EXIT_INTERRUPTED
    if found:
        info("\n".join([*found[:SHOWN], f"... {len(found) - SHOWN} more"] if len(found) > SHOWN else found))
        way_out = "" if config.trainer.deterministic else "; try trainer.deterministic=true"
        info(f"failed: the killed run differs from the unbroken one, both are in {directory}{way_out}")
        return EXIT_FAILED
    info(f"{arguments.kills} kills, and the run ended as the unbroken one, bit for bit; nothing was left running")
    if not arguments.dir:
        shutil.rmtree(directory)
    return 0


@dataclass
class Selftest:
    """Runs of `steps` steps of main_ppo with these arguments; the unbroken one lies in `directory/whole`."""

    arguments: list[str]
    critic: bool
    steps: int
    directory: Path

    def run_unbroken(self) -> None:
        began = time.monotonic()
        self.whole = self._start(self.directory / "whole")
        _finish(self.whole)
        info(f"the unbroken run took {time.monotonic() - began:.0f} s")
        seconds = [record["timing_s/step"] for record in self.whole.records() if "timing_s/step" in record]
        self.seconds_a_step = statistics.median(seconds)

    def run_killed(self, directory: Path, draw: random.Random, kills: int) -> list[str]:
        """Kill a run so often, each time starting it again where it ended; returns how it differs, a line each."""
        self.left: list[str] = []
        self.told: list[str] = []
        run = self._start(directory)
        for number, kill in enumerate(draw_kills(draw, kills, self.steps, self.seconds_a_step), start=1):
            run = self._kill(run, kill, f"kill {number} of {kills}")
        while run.finish() != 0:
            run = self._again(run)
        self._note_left(run)
        return differences(self.whole.directory, directory, self.steps) + self.left

    def _kill(self, run: Run, kill: Kill, number: str) -> Run:
        while not run.reach(kill):
            if run.finish() == 0:
                self._tell(f"{number} came too late: the run was done")
                return run
            run = self._again(run)
        self._tell(f"{number}: {kill}")
        run.suffer(kill)
        return run

    def _again(self, run: Run) -> Run:
        if not run.killed:
            raise RunFailed(f"a run that nobody killed ended with exit status {run.finish()}:\n{run.last_words()}")
        self._note_left(run)
        return self._start(run.directory)

    def _tell(self, line: str) -> None:
        self.told.append(line)
        info(line)

    def _note_left(self, run: Run) -> None:
        self.left += [f"left running: {process}" for process in run.left_running()]

    def _start(self, directory: Path) -> Run:
        """The user's run, in another directory, with every step saved and every sample written."""
        contents = "[model,optimizer,extra]"
        more = {
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
            more["critic.checkpoint.save_contents"] = contents
        own = [f"{key}={value}" for key, value in more.items()]
        return Run([sys.executable, "-m", "hybridrl.main_ppo", *self.arguments, *own], directory)


def _finish(run: Run) -> None:
    if status := run.finish():
        raise RunFailed(f"a run that nobody killed ended with exit status {status}:\n{run.last_words()}")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hybridrl.doctor selftest-resume", description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="the run's own keys, as for main_ppo")
    parser.add_argument("-cp", "--config-path", type=Path, default=CONF, metavar="DIR", help="as for main_ppo")
    parser.add_argument("-cn", "--config-name", default="ppo_trainer", metavar="NAME", help="as for main_ppo")
    parser.add_argument("--steps", type=int, default=4, help="length of the run")
    parser.add_argument("--kills", type=int, default=3, help="how often it is killed")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and processes of the kills")
    parser.add_argument(
        "--dir", help="where both runs are kept; otherwise a temporary directory, deleted if all is well"
    )
    return parser.parse_intermixed_args(argv)
