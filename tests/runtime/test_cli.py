import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from hybridrl import main_ppo, main_sft, project_file
from hybridrl.config import ConfigError, PPOConfig
from hybridrl.core.cluster import WorkerDied
from hybridrl.runtime.cli import RunCommand, run_command
from hybridrl.runtime.guard import NAMES

NEEDED = ["data.train_files=train.jsonl", "actor_rollout_ref.model.path=some/model", "actor_rollout_ref.rollout.n=8"]


@pytest.fixture(autouse=True)
def empty_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    Path("train.jsonl").touch()
    handlers = {number: signal.getsignal(number) for number in NAMES}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@dataclass
class Work:
    """Stands in for a run: records its configurations, and raises an exception if given one."""

    error: BaseException | None = None
    configs: list[object] = field(default_factory=list)

    def __call__(self, config: object) -> None:
        self.configs.append(config)
        if self.error is not None:
            raise self.error

    @property
    def command(self) -> RunCommand:
        return RunCommand(**{**vars(main_ppo.COMMAND), "open": lambda first: nullcontext(self)})


def test_a_run_gets_the_resolved_configuration(capsys):
    work = Work()
    assert run_command(work.command, [*NEEDED, "data.train_batch_size=512"]) == 0
    (config,) = work.configs
    assert isinstance(config, PPOConfig) and config.data.train_batch_size == 512
    assert "train_batch_size=512" in capsys.readouterr().out


def test_a_traceback_is_printed_without_the_secrets_of_the_configuration(capsys):
    work = Work(ValueError("the judge rejects c4n4ry-value"))
    assert run_command(work.command, [*NEEDED, "+reward.reward_kwargs.api_key=c4n4ry-value"]) == 1
    printed = capsys.readouterr()
    assert "ValueError: the judge rejects ***" in printed.err and "c4n4ry" not in printed.err + printed.out


def test_help_and_configuration_leave_a_closed_connection_an_error_elsewhere(capsys):
    before = signal.getsignal(signal.SIGPIPE)
    for option in ("--help", "--cfg"):
        assert run_command(Work().command, [*NEEDED, option]) == 0
    assert signal.getsignal(signal.SIGPIPE) == before != signal.SIG_DFL


def test_a_command_without_arguments_names_the_missing_keys_and_the_help(capsys):
    assert run_command(Work().command, []) == 2
    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    assert lines[:3] == [
        "error:",
        "data.train_files is not set; add data.train_files=...",
        "actor_rollout_ref.model.path is not set; add actor_rollout_ref.model.path=...",
    ]
    assert "for example: hybridrl train \\" in lines
    assert lines[-1] == "(--help all lists all keys)"


def test_an_error_is_printed_literally_to_standard_error(capsys):
    assert run_command(Work().command, [*NEEDED, "trainer.seed=[/red]"]) == 2
    assert capsys.readouterr().err == "error: trainer.seed=[/red]: expected an integer\n"


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ConfigError("data.train_files=x: bad row"), 2, "error: data.train_files=x: bad row"),
        (KeyboardInterrupt(), 130, "stopped (Ctrl-C); no process is left running"),
        (ValueError("no [bold]luck[/]"), 1, "failed [unexpected]: no [bold]luck[/] (ERRORS#unexpected)"),
        (ZeroDivisionError(), 1, "failed [unexpected]: ZeroDivisionError (ERRORS#unexpected)"),
        (WorkerDied("gone\nits log"), 1, "(ERRORS#worker-died)"),
    ],
)
def test_each_ending_has_its_status_and_its_message(capsys, error, status, line):
    assert run_command(Work(error).command, NEEDED) == status
    output = capsys.readouterr()
    assert line.replace("ERRORS", project_file("docs/errors.md")) in (output.out + output.err).splitlines()


def test_only_an_error_from_outside_shows_a_traceback(capsys):
    run_command(Work(ValueError("outside")).command, NEEDED)
    assert "Traceback" in capsys.readouterr().err
    ours = type("Ours", (RuntimeError,), {"__module__": "hybridrl.anywhere", "code": "its-code"})
    run_command(Work(ours("with a message")).command, NEEDED)
    page = project_file("docs/errors.md")
    assert capsys.readouterr().err == f"failed [its-code]: with a message ({page}#its-code)\n"


@pytest.mark.parametrize(("number", "name"), NAMES.items())
def test_a_stopped_run_names_the_signal(capsys, number, name):
    class Stopped(Work):
        def __call__(self, config: object) -> None:
            try:
                os.kill(os.getpid(), number)
            except KeyboardInterrupt:
                raise KeyboardInterrupt from None  # as Ray raises one without a reason

    assert run_command(Stopped().command, NEEDED) == 130
    assert f"stopped ({name})" in capsys.readouterr().out


def test_cfg_prints_yaml_that_loads_again_and_runs_nothing(capsys):
    work = Work()
    assert run_command(work.command, ["--cfg", *NEEDED, "data.train_batch_size=2"]) == 0
    output = capsys.readouterr()
    assert work.configs == []
    assert "warning: actor_rollout_ref.actor.ppo_mini_batch_size=256 is more than" in output.err
    assert yaml.safe_load(output.out)["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] == 2
    Path("custom.yaml").write_text(output.out)
    assert run_command(work.command, ["-cp", ".", "-cn", "custom", "--cfg"]) == 0
    assert capsys.readouterr().out == output.out


@pytest.mark.parametrize("words", [["--cfg", "job"], ["--cfg=job"], ["-c", "job"], ["--cfg", "all", "--resolve"]])
def test_the_configuration_is_printed_as_hydra_s_users_ask_for_it(capsys, words):
    assert run_command(Work().command, [*words, *NEEDED]) == 0
    whole = capsys.readouterr().out
    assert yaml.safe_load(whole)["trainer"]["resume_mode"] == "auto"
    assert run_command(Work().command, [*NEEDED, *words, "-p", "trainer.resume_mode"]) == 0
    assert capsys.readouterr().out == "auto\n"
    assert run_command(Work().command, [*NEEDED, *words, "--package", "trainr"]) == 2
    assert "--package=trainr: there is no such section" in capsys.readouterr().err


def test_a_section_that_does_not_exist_is_an_error_next_to_those_of_the_configuration(capsys):
    assert run_command(Work().command, ["--cfg", "job", "--package", "trainr", "data.train_batch_size=7"]) == 2
    output = capsys.readouterr()
    assert "--package=trainr: there is no such section" in output.err and "Traceback" not in output.err
    assert "data.train_files is not set" in output.err and not output.out


def test_cfg_prints_a_configuration_as_far_as_it_can_be_read_and_what_is_wrong_with_it(capsys):
    assert run_command(Work().command, ["--cfg", "job", "data.train_batch_size=7"]) == 2
    output = capsys.readouterr()
    printed = yaml.safe_load(output.out)
    assert (printed["data"]["train_batch_size"], printed["data"]["train_files"]) == (7, ["???"])
    assert "data.train_files is not set; add data.train_files=..." in output.err


def test_cfg_of_a_sweep_prints_every_configuration_and_runs_nothing(capsys):
    work = Work()
    assert run_command(work.command, ["-m", *NEEDED, "trainer.seed=3,4", "--cfg", "-p", "trainer"]) == 0
    output = capsys.readouterr().out
    assert [one["seed"] for one in yaml.safe_load_all(output)] == [3, 4]
    assert "--- # seed-3\n" in output and work.configs == []


@pytest.mark.parametrize("option", ["--info=all", "-sc", "--config-dir"])
def test_options_of_hydra_that_there_are_not_are_met_with_what_to_do(capsys, option):
    with pytest.raises(SystemExit):
        run_command(Work().command, [option, *NEEDED])
    assert "key=value" not in capsys.readouterr().err.splitlines()[-1]


def test_help_before_a_value_is_not_a_section(capsys):
    assert run_command(Work().command, ["--help", *NEEDED]) == 0
    assert "keys to begin with:" in capsys.readouterr().out


def test_an_unknown_option_is_a_usage_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        run_command(Work().command, ["--config", "x"])
    assert "unknown option --config; configuration keys are given as key=value" in capsys.readouterr().err


@pytest.mark.parametrize("module", [main_ppo, main_sft])
def test_help_shows_an_example_and_lists_the_keys(capsys, module):
    assert module.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: hybridrl {module.COMMAND.name} [key=value ...]" in text
    assert module.COMMAND.purpose in text
    beginning = text.split("keys to begin with:")[1].split("\n\n")[0]
    assert all(key in beginning for key in module.COMMAND.first_keys)
    assert "--help SECTION" in text and "trainer" in text and "  device = auto" not in text
    assert module.main(["--help", "trainer"]) == 0
    assert capsys.readouterr().out.startswith("trainer:\n  device = auto")


@pytest.mark.parametrize("module", [main_ppo, main_sft])
def test_the_schema_of_configuration_files_is_printed_without_a_configuration(capsys, module):
    assert module.main(["--schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == f"{module.COMMAND.config_name}.yaml"


@pytest.mark.parametrize("module", [main_ppo, main_sft])
def test_the_example_of_the_help_is_valid(module):
    for file in ("train.parquet", "test.parquet"):
        Path(file).touch()
    module.COMMAND.load(list(module.COMMAND.example))


def test_the_module_runs_as_a_command():
    command = ["hybridrl.main_ppo", "data.train_files=no.jsonl", "actor_rollout_ref.model.path=a/b"]
    top = Path(main_ppo.__file__).parent.parent
    result = subprocess.run([sys.executable, "-m", *command], cwd=top, capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.startswith("error:")
    assert "data.train_files=no.jsonl: there is no file no.jsonl" in result.stderr
