"""Completion in a shell, through the installed command as the shell calls it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.runtime.completion import completions

COMMAND = Path(sys.executable).with_name("hybridrl")


def complete(line: str, directory: Path) -> list[str]:
    """Return the completions of a line, as argcomplete's function in the shell gets them."""
    out = directory / "completions"
    words = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": "fish", "_ARGCOMPLETE_STDOUT_FILENAME": str(out)}
    environment = os.environ | words | {"COMP_LINE": line, "COMP_POINT": str(len(line)), "IFS": "\v"}
    subprocess.run([COMMAND], env=environment, cwd=directory, check=True, capture_output=True)
    return [word.partition("\t")[0] for word in out.read_text().split("\v") if word]


@pytest.mark.skipif(not COMMAND.exists(), reason="the command is not installed in this environment")
def test_the_shell_gets_commands_and_keys(tmp_path: Path) -> None:
    assert [word.strip() for word in complete("hybridrl sw", tmp_path)] == ["sweep"]
    found = complete("hybridrl train data.sh", tmp_path)
    assert found == ["data.shuffle="]
    assert [word.strip() for word in complete("hybridrl doctor temp", tmp_path)] == ["template"]


def test_a_key_has_its_meaning() -> None:
    found = completions("train", "actor_rollout_ref.rollout.temp")
    assert [*found] == ["actor_rollout_ref.rollout.temperature="]
    assert "sampling" in found["actor_rollout_ref.rollout.temperature="].lower()


@pytest.mark.parametrize(
    ("prefix", "values"),
    [
        ("data.shuffle=", ["true", "false"]),
        ("+data.shuffle=t", ["true"]),
        ("algorithm.adv_estimator=grpo", ["grpo", "grpo_vectorized", "grpo_passk"]),
        ("actor_rollout_ref.actor.kl_loss_type=k1", ["k1", "k1+"]),
    ],
)
def test_a_value_is_completed_from_what_the_key_takes(prefix: str, values: list[str]) -> None:
    key = prefix.partition("=")[0]
    assert {*completions("train", prefix)} == {f"{key}={value}" for value in values}


def test_files_are_completed_where_there_are_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").touch()
    assert [*completions("train", "data.train_files=tr")] == ["data.train_files=train.jsonl"]
    assert [*completions("merge", "tr")] == ["train.jsonl"]


def test_supervised_runs_have_their_own_keys() -> None:
    assert [*completions("sft", "optim.lr_scheduler_type=w")] == ["optim.lr_scheduler_type=wsd"]
    assert {*completions("sft", "optim.lr_w")} == {"optim.lr_warmup_steps=", "optim.lr_warmup_steps_ratio="}
