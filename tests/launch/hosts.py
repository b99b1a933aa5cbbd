"""Keys of a run, and three hosts with their scheduler: programs of fakes/ and standins/ on this machine."""

import os
import subprocess
import time
from pathlib import Path

PLACE = Path(__file__).parent
RUN = [
    "data.train_files=rows.jsonl",
    "actor_rollout_ref.model.path=some/model",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
]
POOLS = [
    *("trainer.v1.trainer_mode=separate_async", "trainer.nnodes=2", "trainer.n_gpus_per_node=8"),
    *("actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=8"),
]


class Cluster:
    """Runs what a scheduler is given, in directories of its own. `before`: words with which the first host starts a
    program; `standins`: also in place of Ray and hybridrl."""

    def __init__(self, directory: Path, hosts: str, *before: str, standins: bool = True) -> None:
        self.state, self.run, self.before = directory / "state", directory / "run", before
        self.state.mkdir(parents=True)
        (self.state / "began").touch()
        programs = [PLACE / "standins"] * standins + [PLACE / "fakes"]
        self.environment = os.environ | {
            "PATH": ":".join([*map(str, programs), os.environ["PATH"]]),
            "STATE": str(self.state),
            "RUN": str(self.run),
            "HOSTS": hosts,
            "HOST": hosts.split(",")[0],
        }

    def start(self, file: Path, **variables: str) -> subprocess.Popen[str]:
        program = "sbatch" if file.name.startswith("slurm") else "bash"
        return subprocess.Popen(
            [*self.before, program, file],
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def signal(self, process: subprocess.Popen[str], number: int) -> None:
        """Send a signal to the script, as a scheduler does, and not to what it has started."""
        batch = self.read("batch.pid")
        os.kill(int(batch) if batch else process.pid, number)

    def wait_for(self, name: str, text: str = "", seconds: float = 20) -> None:
        """Wait until a file of the state has this text."""
        deadline = time.monotonic() + seconds
        while not (self.state / name).exists() or text not in self.read(name):
            assert time.monotonic() < deadline, f"{name}: {text}"
            time.sleep(0.05)

    def read(self, name: str) -> str:
        return (self.state / name).read_text() if (self.state / name).exists() else ""

    def output(self, process: subprocess.Popen[str], seconds: float = 40) -> str:
        """Wait for the end, and return what the script and its hosts have printed."""
        printed, _ = process.communicate(timeout=seconds)
        return printed + "".join(path.read_text() for path in sorted((self.run / "launch").glob("*.log")))

    @property
    def left(self) -> list[str]:
        """Files of the launch other than logs, and stand-ins of Ray that live."""
        files = [path.name for path in (self.run / "launch").iterdir() if path.suffix != ".log"]
        return files + [path.name for path in self.state.glob("alive-*")]
