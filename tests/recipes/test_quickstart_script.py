"""The script with stand-ins for the installer and for Python, which record their calls."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "quickstart.sh"

INSTALL = "#!/bin/bash\necho install.sh >>calls\n"
PYTHON = """#!/bin/bash
echo "$*" >>calls
[[ $2 != "$FAILING" ]] || exit 7
[[ $2 != hybridrl.main_sft ]] || mkdir -p outputs/{quickstart,agent,tool}/warmup
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = ["recipes/quickstart/make_data.py", "recipes/quickstart/warmup.yaml", "conf/sft_trainer.yaml"]
    files += ["conf/data/sft.yaml", "hybridrl/runs/sft.py", "hybridrl/data/rows.py", "hybridrl/core/training/worker.py"]
    files += ["hybridrl/core/trainer.py"]
    pythons = [".venv/bin/python", ".venv-sglang/bin/python"]
    for name in [*files, "scripts/install.sh", *pythons]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    (tmp_path / "scripts" / "install.sh").write_text(INSTALL)
    for name in pythons:
        (tmp_path / name).write_text(PYTHON)
        (tmp_path / name).chmod(0o755)
    shutil.copy(SCRIPT, tmp_path / "scripts")
    return tmp_path


def call(checkout: Path, *arguments: str, failing: str = "") -> tuple[int, list[str], str]:
    """Run the script; return its exit status, the commands that it ran, and its output."""
    (checkout / "calls").write_text("")
    script = checkout / "scripts" / "quickstart.sh"
    done = subprocess.run(
        ["bash", str(script), *arguments],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "FAILING": failing},
    )
    return done.returncode, (checkout / "calls").read_text().splitlines(), done.stdout + done.stderr


def stages(commands: list[str]) -> list[str]:
    names = ("install.sh", "hybridrl.doctor", "make_data.py", "main_sft", "main_ppo", "show.py")
    return [next(name for name in names if name in command) for command in commands]


def test_a_first_call_installs_warms_up_trains_and_shows(checkout):
    status, commands, printed = call(checkout, "--seed", "3", "trainer.total_training_steps=2")
    names = ["install.sh", "hybridrl.doctor", "make_data.py", "main_sft", "main_ppo", "show.py"]
    assert (status, stages(commands)) == (0, names)
    assert commands[1].endswith(
        "--config-only --config-path recipes/quickstart --config-name train trainer.total_training_steps=2"
    )
    assert commands[2].endswith("--seed 3")
    assert commands[3].endswith("trainer.seed=3")
    assert commands[4].endswith("trainer.seed=3 trainer.total_training_steps=2")
    for command in commands[2:5]:
        assert f"$ .venv/bin/python {command}\n" in printed


def test_a_second_call_trains_again_from_the_same_warm_start(checkout):
    call(checkout)
    status, commands, _ = call(checkout, "actor_rollout_ref.rollout.n=4")
    assert (status, stages(commands)) == (0, ["install.sh", "hybridrl.doctor", "main_ppo", "show.py"])


@pytest.mark.parametrize(
    ("option", "make", "train", "show"),
    [
        ("--agent", "make_games.py", "agent", "show_games.py"),
        ("--tool", "make_products.py", "tool", "show_products.py"),
    ],
)
def test_an_option_selects_another_task_with_its_own_warm_start(checkout, option, make, train, show):
    recipe = checkout / "recipes" / "quickstart"
    (recipe / make).write_text(make)
    (recipe / f"{train}_warmup.yaml").write_text(train)
    call(checkout)  # whose warm start is not the one of the option
    status, commands, _ = call(checkout, option)
    assert status == 0
    assert commands[1] == f"recipes/quickstart/{make} --out outputs/{train}/data --seed 0"
    assert f"--config-name {train}_warmup " in commands[2] and f"--config-name {train} " in commands[3]
    assert commands[4].startswith(f"recipes/quickstart/{show} outputs/{train} ")


@pytest.mark.parametrize("words", [["-h"], ["--agent", "--help"]])
def test_help_prints_how_the_script_is_called_and_runs_nothing(checkout, words):
    status, commands, printed = call(checkout, *words)
    assert (status, commands) == (0, []) and "set -euo" not in printed
    assert "bash scripts/quickstart.sh [--agent | --tool] [--sglang] [--seed N]" in printed


def test_values_that_are_rejected_are_known_before_the_warm_start(checkout):
    status, commands, printed = call(checkout, "trainer.total_trainin_steps=2", failing="hybridrl.doctor")
    assert (status, stages(commands)) == (2, ["install.sh", "hybridrl.doctor"])
    assert "quickstart.sh: these values are rejected" in printed
    status, commands, printed = call(checkout, "reward.custom_reward_function.path=my_reward.py")
    assert (status, commands) == (2, [])
    assert "there is no file my_reward.py" in printed


@pytest.mark.parametrize(
    "changed", ["recipes/quickstart/warmup.yaml", "hybridrl/core/training/worker.py", "conf/data/sft.yaml"]
)
def test_a_change_of_its_dependencies_creates_a_new_warm_start(checkout, changed):
    call(checkout)
    (checkout / changed).write_text("something else\n")
    assert "main_sft" in stages(call(checkout)[1])


def test_another_seed_creates_a_new_warm_start(checkout):
    call(checkout)
    assert "main_sft" in stages(call(checkout, "--seed", "1")[1])


@pytest.mark.parametrize("failing", ["hybridrl.main_sft", "hybridrl.main_ppo"])
def test_a_failure_ends_the_script_with_its_status_and_discards_an_incomplete_warm_start(checkout, failing):
    status, commands, _ = call(checkout, failing=failing)
    assert (status, stages(commands)[-1]) == (7, failing.removeprefix("hybridrl."))
    assert ("main_sft" in stages(call(checkout)[1])) == (failing == "hybridrl.main_sft")


@pytest.mark.parametrize("arguments", [["--seed"], ["--seed", "two"], ["fast"]])
def test_unknown_arguments_are_rejected_before_anything_runs(checkout, arguments):
    status, commands, printed = call(checkout, *arguments)
    assert (status, commands) == (2, [])
    assert "bash scripts/quickstart.sh [--agent | --tool] [--sglang] [--seed N] [key=value ...]" in printed
