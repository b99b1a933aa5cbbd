"""`hybridrl COMMAND`: the commands of the package under one name."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl import __version__
from hybridrl.__main__ import COMMANDS
from hybridrl.doctor.__main__ import FIRST_LEVEL, FORMER

TOP = Path(__file__).parents[1]
TEXTS = (".py", ".yaml", ".md", ".js", ".sh", ".ipynb")


def hybridrl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hybridrl", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("module", [module for module in COMMANDS.values() if module])
def test_every_command_is_a_module_that_can_be_run(module):
    found = importlib.util.find_spec(module)
    assert found and (not found.submodule_search_locations or importlib.util.find_spec(f"{module}.__main__"))


def test_the_commands_and_the_version_are_shown():
    shown = hybridrl("--help")
    lines = shown.stdout.splitlines()
    assert shown.returncode == 0 and len(lines) <= 24 and max(map(len, lines)) <= 80
    assert [name for name in COMMANDS if not any(f" {name} " in line[:24] for line in lines)] == []
    assert hybridrl("--version").stdout == f"hybridrl {__version__}\n"


def test_without_a_command_or_with_one_that_is_mistyped_the_status_is_2():
    assert (hybridrl().returncode, hybridrl("trian").returncode) == (2, 2)
    shown = hybridrl("trian")
    assert shown.stdout + shown.stderr == "error: there is no command trian; train? (hybridrl --help lists them)\n"


def test_a_command_gets_the_other_arguments_and_gives_its_status():
    explained = hybridrl("explain", "actor_rollout_ref.rollout.n")
    assert explained.returncode == 0 and "Responses per prompt" in explained.stdout
    rejected = hybridrl("train", "data.train_fils=x")
    assert rejected.returncode == 2 and "data.train_files" in rejected.stdout + rejected.stderr


def test_merge_is_the_mergers_first_operation(tmp_path):
    missing = hybridrl("merge", "--local_dir", str(tmp_path / "none"))
    assert missing.returncode == 2 and str(tmp_path / "none") in missing.stdout + missing.stderr


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["keys", "clip_ratio_c"], "explain"),
        (["explain", "trainer.seed"], "explain"),
        (["reward", "reward.scale=2", "--rows", "rows.jsonl", "reward.name=gsm8k"], "rescore"),
        (["reward", "--rows=rows.jsonl", "--data-source", "gsm8k"], "rescore"),
    ],
)
def test_former_names_work_and_print_the_present_one(tmp_path, monkeypatch, words, name):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"output": "#### 2", "gts": "2"}\n')
    shown = hybridrl("doctor", *words)
    assert shown.returncode == 0 and shown.stdout
    assert shown.stderr.splitlines()[0] == f"hybridrl doctor {words[0]} is now hybridrl {name}"


def test_the_commands_without_a_module_are_those_of_the_doctor_s_table():
    assert sorted(name for name, module in COMMANDS.items() if not module) == sorted(FIRST_LEVEL)


def test_no_text_of_the_product_names_a_command_in_another_way():
    former = "|".join([*FIRST_LEVEL, *FORMER])
    other = re.compile(
        rf"python3? -m (?:hybridrl|\{{)|hybridrl doctor (?:{former})\b|hybridrl\.(?:main_ppo|main_sft) \S+="
    )
    files = [path for folder in ("hybridrl", "conf", "recipes") for path in (TOP / folder).rglob("*")]
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.suffix in TEXTS}
    assert len(texts) > 300
    assert [f"{path}: {found[0]}" for path, text in texts.items() for found in other.finditer(text)] == []


def test_output_into_a_pipe_that_closes_ends_quietly():
    command = f"{sys.executable} -m hybridrl explain a | head -1"
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert shown.returncode == 0 and shown.stderr == "" and len(shown.stdout.splitlines()) == 1
