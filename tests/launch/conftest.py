"""Commands that are rendered, and hosts and schedulers that are programs of this directory."""

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hybridrl.config.compose import as_override
from hybridrl.launch.__main__ import main

PLACE = Path(__file__).parent
RUN = [
    "data.train_files=rows.jsonl",
    "actor_rollout_ref.model.path=some/model",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
]
SHARED = ["trainer.default_local_dir=/shared/run"]
POOLS = [
    *("trainer.v1.trainer_mode=separate_async", "trainer.nnodes=2", "trainer.n_gpus_per_node=8"),
    *("actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=8"),
]
# Options and keys of a run, by what is special about it.
COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "plain": ([], []),
    "spaces": ([], ["+mine.text=" + as_override("two  words ")]),
    "quotes": ([], ["+mine.text=" + as_override('it\'s "quoted" `as` \\ $HOME $(id) $$ !x')]),
    "references": ([], ["+mine.text=${trainer.project_name}"]),
    "newlines": ([], ["+mine.text=" + as_override("a\n#SBATCH --exclusive\r\n\t\x85\u2028é")]),
    "container": (["--container", "registry/image:1.0", "--mounts", "/a:/b"], []),
    "venv": (["--before", "source '.venv/bin/activate'\nulimit -c 0", "--env", "MINE=a 'b'\n$c $(d) $$"], []),
    "pools": ([], POOLS),
}


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    Path("hosts").write_text("host-a\nhost-b # the second\n\nhost-c\n")
    return tmp_path


Rendered = Callable[..., Path]


@pytest.fixture
def rendered(directory: Path) -> Rendered:
    """Write the file of a launch, and return its path."""

    def write(engine: str, options: Sequence[str], words: Sequence[str]) -> Path:
        file = directory / f"{engine}-{time.monotonic_ns()}"
        assert main([engine, "--out", str(file), *options, "--", *words]) == 0
        return file

    return write


class Cluster:
    """Three hosts and their scheduler, which starts the commands on this machine."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.state, self.run = directory, directory / "state", directory / "run"
        self.state.mkdir()
        (self.state / "began").touch()
        path = f"{PLACE / 'standins'}:{PLACE / 'fakes'}:{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": path, "STATE": str(self.state), "RUN": str(self.run)}
        self.environment |= {"HOSTS": "host-a,host-b,host-c", "HOST": "host-a"}

    def start(self, file: Path, **variables: str) -> subprocess.Popen[str]:
        program = "sbatch" if file.name.startswith("slurm") else "bash"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([program, file], env=self.environment | variables, **pipes)

    def wait_for(self, name: str, text: str = "") -> None:
        """Wait until a file of the state has this text."""
        deadline = time.monotonic() + 20
        while not (self.state / name).exists() or text not in self.read(name):
            assert time.monotonic() < deadline, f"{name}: {text}"
            time.sleep(0.05)

    def read(self, name: str) -> str:
        return (self.state / name).read_text() if (self.state / name).exists() else ""

    @property
    def left(self) -> list[str]:
        """Files of the launch other than logs, and hosts with a Ray."""
        files = [path.name for path in (self.run / "launch").iterdir() if path.suffix != ".log"]
        return files + [path.name for path in self.state.glob("alive-*")]


@pytest.fixture
def cluster(directory: Path) -> Cluster:
    return Cluster(directory)
