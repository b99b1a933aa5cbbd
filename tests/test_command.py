"""`hybridrl COMMAND`: the commands of the package under one name."""

import importlib.util
import subprocess
import sys

import pytest

from hybridrl import __version__
from hybridrl.__main__ import COMMANDS


def hybridrl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hybridrl", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("module", [module for module, _ in COMMANDS.values()])
def test_every_command_is_a_module_that_can_be_run(module):
    found = importlib.util.find_spec(module)
    assert found and (not found.submodule_search_locations or importlib.util.find_spec(f"{module}.__main__"))


def test_the_commands_and_the_version_are_shown():
    shown = hybridrl("--help")
    assert shown.returncode == 0 and all(f"\n  {name} " in shown.stdout for name in COMMANDS)
    assert hybridrl("--version").stdout == f"hybridrl {__version__}\n"


def test_without_a_command_or_with_one_that_is_mistyped_the_status_is_2():
    assert (hybridrl().returncode, hybridrl("trian").returncode) == (2, 2)
    shown = hybridrl("trian")
    assert shown.stdout + shown.stderr == "error: there is no command trian; train? (hybridrl --help lists them)\n"


def test_a_command_gets_the_other_arguments_and_gives_its_status():
    explained = hybridrl("doctor", "explain", "actor_rollout_ref.rollout.n")
    assert explained.returncode == 0 and "Responses per prompt" in explained.stdout
    rejected = hybridrl("train", "data.train_fils=x")
    assert rejected.returncode == 2 and "data.train_files" in rejected.stdout + rejected.stderr


def test_merge_is_the_mergers_first_operation(tmp_path):
    missing = hybridrl("merge", "--local_dir", str(tmp_path / "none"))
    assert missing.returncode == 2 and str(tmp_path / "none") in missing.stdout + missing.stderr
