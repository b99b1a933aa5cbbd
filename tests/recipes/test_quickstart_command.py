"""`hybridrl quickstart` with a stand-in that records the commands of its stages; the script that calls it."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from hybridrl import project_file, quickstart

SCRIPT = Path(__file__).parents[2] / "scripts" / "quickstart.sh"


class Stages:
    """Records commands; the one that has the word `failing` ends with status 7."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.commands = failing, list[str]()

    def __call__(self, command: Sequence[str], *, quiet: bool = False) -> int:
        self.commands.append(" ".join(command[1:]).removeprefix("-m "))
        if self.failing and self.failing in command:
            return 7
        if "sft" in command:
            name = {
                "warmup": "quickstart",
                "agent_warmup": "agent",
                "tool_warmup": "tool",
                "pictures_warmup": "pictures",
            }
            place = command[command.index("--config-name") + 1]
            Path("outputs", name[place], "warmup").mkdir(parents=True)
        return 0

    @property
    def names(self) -> list[str]:
        known = ("doctor", "make_data.py", "sft", "train ", "show.py")
        return [next(name for name in known if name in command).strip() for command in self.commands]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(*arguments: str, failing: str = "") -> tuple[int, Stages]:
    stages = Stages(failing)
    try:
        return quickstart.main([*arguments], stages), stages
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code, stages


def test_a_first_call_warms_up_trains_and_shows_with_the_recipes_files_wherever_they_are(capsys):
    status, stages = call("--seed", "3", "trainer.total_training_steps=2")
    recipe = project_file("recipes/quickstart")
    assert (status, stages.names) == (0, ["doctor", "make_data.py", "sft", "train", "show.py"])
    assert stages.commands[1] == f"{recipe}/make_data.py --out outputs/quickstart/data --seed 3"
    assert stages.commands[2].endswith(f"sft --config-path {recipe} --config-name warmup trainer.seed=3")
    reward = f"reward.custom_reward_function.path={recipe}/reward.py"
    assert stages.commands[3].endswith(f"trainer.seed=3 {reward} trainer.total_training_steps=2")
    assert f"$ {stages.commands[3]}\n" in capsys.readouterr().out


def test_ctrl_c_while_values_are_checked_ends_it_with_one_line(tmp_path):
    # `sitecustomize` stands in for a check that takes long: it says that it has begun.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\nif 'doctor' in sys.orig_argv:\n    open('begun', 'w').close()\n    time.sleep(60)\n"
    )
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(SCRIPT.parents[1])])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": variables}
    command = [sys.executable, "-m", "hybridrl", "quickstart", "trainer.seed=1"]
    interruptible = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background job ignores it
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=interruptible, **pipes)
    end = time.monotonic() + 60
    while not Path("begun").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (130, "stopped (Ctrl-C); no process is left running\n", "")


def test_a_command_that_a_signal_ends_has_the_status_of_a_shell():
    code = "from hybridrl.quickstart import run_command; raise SystemExit(run_command(['sh', '-c', 'kill -KILL $$']))"
    assert subprocess.run([sys.executable, "-c", code], cwd=SCRIPT.parents[1]).returncode == 128 + signal.SIGKILL


def test_in_a_checkout_the_recipe_is_trained_as_it_stands(monkeypatch):
    monkeypatch.setattr(quickstart, "project_file", lambda path: path)
    monkeypatch.setattr(quickstart, "warm_start_key", lambda *_: "")
    assert call()[1].commands[2] == "hybridrl train --config-path recipes/quickstart --config-name train trainer.seed=0"


def test_a_second_call_trains_again_from_the_same_warm_start():
    call()
    assert call("actor_rollout_ref.rollout.n=4")[1].names == ["doctor", "train", "show.py"]
    assert "sft" in call("--seed", "1")[1].names


@pytest.mark.parametrize("changed", ["warmup.yaml", "make_data.py"])
def test_a_change_of_its_files_creates_a_new_warm_start(changed, tmp_path, monkeypatch):
    shutil.copytree(project_file("recipes"), tmp_path / "recipes")
    places = {"recipes/quickstart": str(tmp_path / "recipes/quickstart")}
    monkeypatch.setattr(quickstart, "project_file", lambda path: places.get(path) or project_file(path))
    call()
    with (tmp_path / "recipes" / "quickstart" / changed).open("a") as file:
        file.write("# something else\n")
    assert "sft" in call()[1].names


@pytest.mark.parametrize(
    ("option", "make", "train", "show"),
    [
        ("--agent", "make_games", "agent", "show_games"),
        ("--tool", "make_products", "tool", "show_products"),
        ("--images", "make_pictures", "pictures", "show_pictures"),
    ],
)
def test_an_option_selects_another_task_with_its_own_warm_start(option, make, train, show):
    call()  # whose warm start is not the one of the option
    status, stages = call(option)
    made, warmed, trained, shown = stages.commands
    assert status == 0 and made.endswith(f"/{make}.py --out outputs/{train}/data --seed 0")
    assert f"--config-name {train}_warmup " in warmed and f"--config-name {train} " in trained
    assert f"/{show}.py outputs/{train} --warm-start-seconds " in shown


def test_a_pretrained_model_needs_no_warm_start():
    status, stages = call("--model", "some/model")
    assert (status, stages.names) == (0, ["make_data.py", "train", "show.py"])
    assert "actor_rollout_ref.model.path=some/model" in stages.commands[1] and "pretrained" in stages.commands[1]


def test_values_that_are_rejected_are_known_before_the_warm_start(capsys):
    status, stages = call("trainer.total_trainin_steps=2", failing="doctor")
    assert (status, stages.names) == (2, ["doctor"])
    status, stages = call("reward.custom_reward_function.path=my_reward.py")
    assert (status, stages.names) == (2, []) and "there is no file my_reward.py" in capsys.readouterr().err


@pytest.mark.parametrize("failing", ["sft", "train"])
def test_a_failure_ends_it_with_the_status_and_discards_an_incomplete_warm_start(failing):
    status, stages = call(failing=failing)
    assert (status, stages.names[-1]) == (7, failing)
    assert ("sft" in call()[1].names) == (failing == "sft")


@pytest.mark.parametrize("arguments", [["--seed"], ["--seed", "two"], ["fast"], ["--agent", "--tool"], ["--fast"]])
def test_unknown_arguments_are_rejected_before_anything_runs(arguments, capsys):
    status, stages = call(*arguments)
    assert (status, stages.commands) == (2, [])
    assert "usage: hybridrl quickstart" in capsys.readouterr().err


@pytest.fixture
def checkout(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """A checkout whose installer and command print their arguments; calls the script in it."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    (tmp_path / "scripts" / "install.sh").write_text('echo "install $*"\n')
    for venv in (".venv", ".venv-sglang"):
        command = tmp_path / venv / "bin" / "hybridrl"
        command.parent.mkdir(parents=True)
        command.write_text(f'#!/bin/bash\necho "{venv} $*"\n')
        command.chmod(0o755)

    def call(*arguments: str) -> tuple[int, str]:
        command = ["bash", str(tmp_path / "scripts" / SCRIPT.name), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
        return done.returncode, done.stdout + done.stderr

    return call


@pytest.mark.parametrize(
    ("arguments", "installed", "called"),
    [
        (["--agent", "--seed", "1", "a.b=2"], "install \n", ".venv quickstart --agent --seed 1 a.b=2\n"),
        (["--sglang"], "install --sglang\n", ".venv-sglang quickstart actor_rollout_ref.rollout.name=sglang\n"),
    ],
)
def test_the_script_installs_and_calls_the_command(checkout, arguments, installed, called):
    status, printed = checkout(*arguments)
    assert status == 0 and printed.endswith(installed + called)


def test_the_script_prints_how_it_is_called_and_rejects_what_it_does_not_know(checkout):
    status, printed = checkout("--agent", "--help")
    assert status == 0 and "set -euo" not in printed and "install " not in printed
    assert "bash scripts/quickstart.sh [--agent | --tool | --images | --model MODEL] [--sglang] [--seed N]" in printed
    status, printed = checkout("fast")
    assert status == 2 and "unknown argument 'fast'" in printed
