import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from hybridrl import main_ppo, main_sft
from hybridrl.config import ConfigError
from hybridrl.runtime.cli import FrontDoor, run_command
from hybridrl.runtime.signals import NAMES

NEEDED = ["data.train_files=train.jsonl", "actor_rollout_ref.model.path=some/model", "actor_rollout_ref.rollout.n=8"]


@pytest.fixture(autouse=True)
def a_place_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    Path("train.jsonl").touch()
    handlers = {number: signal.getsignal(number) for number in (*NAMES, signal.SIGPIPE)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@dataclass
class Work:
    """Stands in for a run: remembers what it was given, and ends as it is told."""

    ends_with: BaseException | None = None
    given: list[object] = field(default_factory=list)

    def __call__(self, config: object) -> None:
        self.given.append(config)
        if self.ends_with is not None:
            raise self.ends_with

    @property
    def door(self) -> FrontDoor:
        return FrontDoor(**{**vars(main_ppo.DOOR), "run": self})


def test_a_run_gets_the_resolved_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    work = Work()
    assert run_command(work.door, [*NEEDED, "data.train_batch_size=512"]) == 0
    (config,) = work.given
    assert config.data.train_batch_size == 512
    assert "train_batch_size=512" in capsys.readouterr().out


def test_a_command_without_arguments_says_what_is_missing_and_where_help_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(Work().door, []) == 2
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert lines[:3] == [
        "refused",
        "data.train_files is not set; add data.train_files=...",
        "actor_rollout_ref.model.path is not set; add actor_rollout_ref.model.path=...",
    ]
    assert "for example: python -m hybridrl.main_ppo \\" in lines
    assert lines[-1] == "(--help lists all keys)"


def test_a_refusal_goes_to_standard_error_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(Work().door, [*NEEDED, "trainer.seed=[/red]"]) == 2
    assert capsys.readouterr().err == "refused trainer.seed=[/red]: expected an integer\n"


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        (ConfigError("data.train_files=x: bad row"), 2, "refused data.train_files=x: bad row"),
        (KeyboardInterrupt(), 130, "stopped (Ctrl-C); nothing is left running"),
        (ValueError("no [bold]luck[/]"), 1, "failed no [bold]luck[/]"),
        (ZeroDivisionError(), 1, "failed ZeroDivisionError"),
    ],
)
def test_each_end_has_its_status_and_its_words(
    capsys: pytest.CaptureFixture[str], end: BaseException, status: int, said: str
) -> None:
    assert run_command(Work(end).door, NEEDED) == status
    output = capsys.readouterr()
    assert said in (output.out + output.err).splitlines()


def test_only_a_failure_that_is_not_ours_shows_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(Work(ValueError("theirs")).door, NEEDED)
    assert "Traceback" in capsys.readouterr().err
    ours = type("Ours", (RuntimeError,), {"__module__": "hybridrl.anywhere"})
    run_command(Work(ours("all is said")).door, NEEDED)
    assert capsys.readouterr().err == "failed all is said\n"


@pytest.mark.parametrize(("number", "name"), NAMES.items())
def test_a_run_says_by_what_it_was_stopped(
    capsys: pytest.CaptureFixture[str], number: signal.Signals, name: str
) -> None:
    class Stopped(Work):
        def __call__(self, config: object) -> None:
            try:
                os.kill(os.getpid(), number)
            except KeyboardInterrupt:
                raise KeyboardInterrupt from None  # as Ray makes one of its own

    assert run_command(Stopped().door, NEEDED) == 130
    assert f"stopped ({name})" in capsys.readouterr().out


def test_cfg_prints_yaml_that_loads_again_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    work = Work()
    assert run_command(work.door, ["--cfg", *NEEDED, "data.train_batch_size=2"]) == 0
    said = capsys.readouterr()
    assert work.given == []
    assert "warning: actor_rollout_ref.actor.ppo_mini_batch_size=256 is more than" in said.err
    assert yaml.safe_load(said.out)["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] == 2
    Path("own.yaml").write_text(said.out)
    assert run_command(work.door, ["-cp", ".", "-cn", "own", "--cfg"]) == 0
    assert capsys.readouterr().out == said.out


def test_an_unknown_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_command(Work().door, ["--config", "x"])
    assert "unknown option --config; configuration keys are given as key=value" in capsys.readouterr().err


@pytest.mark.parametrize("front", [main_ppo, main_sft])
def test_help_says_how_to_begin_and_lists_the_keys(capsys: pytest.CaptureFixture[str], front) -> None:
    assert front.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: python -m {front.__name__} [key=value ...]" in text
    assert front.DOOR.purpose in text
    beginning = text.split("keys to begin with:")[1].split("\n\n")[0]
    assert all(key in beginning for key in front.DOOR.first_keys)
    assert "\ntrainer:\n  device = auto" in text


@pytest.mark.parametrize("front", [main_ppo, main_sft])
def test_the_example_of_help_works_where_its_files_are(front) -> None:
    for file in ("train.parquet", "test.parquet"):
        Path(file).touch()
    front.DOOR.load(list(front.DOOR.example))


def test_the_module_runs_as_a_command() -> None:
    top = Path(main_ppo.__file__).parent.parent
    command = [
        sys.executable,
        "-m",
        "hybridrl.main_ppo",
        "data.train_files=no.jsonl",
        "actor_rollout_ref.model.path=a/b",
    ]
    result = subprocess.run(command, cwd=top, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("refused data.train_files=no.jsonl: there is no file no.jsonl")
