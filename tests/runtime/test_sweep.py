"""Sweeps: their combinations, what is checked before the first run, and runs that fail; with a stand-in for a run."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridrl import main_ppo
from hybridrl.config import ConfigError
from hybridrl.runtime.cli import RunCommand, combination_name, parts_of_machine, run_command


class Runs:
    """A stand-in for training: records its configurations, and fails for directories with a given end."""

    def __init__(self, failing: str = "-") -> None:
        self.failing, self.done, self.opened = failing, [], 0

    @property
    def command(self) -> RunCommand:
        return RunCommand(**{**vars(main_ppo.COMMAND), "open": self.open})

    @contextmanager
    def open(self, first: object):
        self.opened += 1
        yield self.run

    def run(self, config) -> None:
        name = Path(config.trainer.default_local_dir).name
        if name.endswith(self.failing):
            raise RuntimeError("no luck")
        self.done.append((name, config.actor_rollout_ref.actor.optim.lr, config.data.seed))


@pytest.fixture
def needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "train.jsonl").touch()
    model = "actor_rollout_ref.model.path=some/model"
    return ["-m", f"data.train_files={tmp_path}/train.jsonl", model, f"trainer.default_local_dir={tmp_path}/out"]


LR = "actor_rollout_ref.actor.optim.lr"


def test_every_combination_runs_in_a_directory_of_its_name_on_one_ray(needed):
    runs = Runs()
    assert run_command(runs.command, [*needed, f"{LR}=1e-3,2e-3", "data.seed=range(1,3)"]) == 0
    assert runs.opened == 1
    assert runs.done == [
        ("lr-0.001_seed-1", 1e-3, 1),
        ("lr-0.001_seed-2", 1e-3, 2),
        ("lr-0.002_seed-1", 2e-3, 1),
        ("lr-0.002_seed-2", 2e-3, 2),
    ]


def test_a_run_that_fails_does_not_stop_the_others(needed, capsys):
    runs = Runs(failing="seed-1")
    assert run_command(runs.command, [*needed, "data.seed=0,1,2"]) == 1
    assert [seed for _, _, seed in runs.done] == [0, 2]
    assert "seed-1: failed [unexpected]: no luck" in capsys.readouterr().out


def test_a_run_that_returns_an_exit_status_does_not_stop_the_others(needed, capsys):
    class Faulty(Runs):
        def run(self, config) -> int:
            super().run(config)
            return 3 if config.data.seed == 0 else 0

    runs = Faulty()
    assert run_command(runs.command, [*needed, "data.seed=0,1"]) == 1 and len(runs.done) == 2
    assert "seed-0: exit status 3 in" in capsys.readouterr().out
    assert run_command(runs.command, [*needed[1:], "data.seed=0"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.seed=0,-2"], "seed--2: data.seed=-2: must be at least 0"),
        (["data.seed=1"], "needs a key with several values"),
        (
            ["data.seed=range(5,0)"],
            "data.seed has no value in data.seed=range(5,0); count upwards, as in data.seed=range",
        ),
        (["trainer.default_local_dir=a,b"], "trainer.default_local_dir has several values"),
        (["data.seed=interval(0,1)"], "single values are expected"),
        (["data.seed=1,1"], "two runs would be named seed-1"),
        (["data.sed=0,1"], "unknown key data.sed"),
        (["data.seed=0,1", "--at-once=4096"], "--at-once=4096: this machine has"),
    ],
)
def test_a_sweep_is_rejected_before_its_first_run(needed, capsys, arguments, message):
    runs = Runs()
    assert run_command(runs.command, [*needed, *arguments]) == 2
    assert runs.done == [] and message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("combination", "name"),
    [
        ({"a.lr": "0.1", "data.seed": "3"}, "lr-0.1_seed-3"),
        ({"actor.lr": "1", "critic.lr": "2"}, "actor.lr-1_critic.lr-2"),
        ({"+own.word": "'a b,c'"}, "word-_a_b_c_"),
        ({"data.train_files": "[/data/x.jsonl]"}, "train_files-_data_x.jsonl_"),
    ],
)
def test_names_need_no_quotes(combination, name):
    assert combination_name(combination) == name


def gpu_runs(each: int) -> SimpleNamespace:
    return SimpleNamespace(trainer=SimpleNamespace(device="cuda"), devices_per_machine=each)


def test_gpus_are_divided_among_runs_at_once(monkeypatch, cores):
    cores(8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    parts = list(parts_of_machine(gpu_runs(2), 2))
    assert [part.environment["CUDA_VISIBLE_DEVICES"] for part in parts] == ["4,5", "6,7"]
    assert [part.cores for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_more_runs_at_once_than_there_are_gpus_are_rejected(monkeypatch, cores):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    cores(8)
    with pytest.raises(ConfigError, match="need 3 GPUs, and this machine has 2"):
        list(parts_of_machine(gpu_runs(1), 3))
