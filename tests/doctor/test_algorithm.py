"""`doctor algorithm`: a custom estimator or loss on made-up groups."""

from pathlib import Path

import pytest

from .conftest import Doctor

SOURCE = """
def centered(batch, *, gamma, own):
    scores = batch.per_row(batch.token_rewards)
    advantages = (scores - scores.mean())[batch.response_row] * gamma
    return advantages, advantages, {"mean": scores.mean(), "bonus": own.get("bonus", 0)}

def plain(log_probs, batch):
    return -batch.advantages * log_probs, {}

def broken(batch):
    return batch.rewards, batch.rewards
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path / "mine.py"


def cells(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if line.strip()]


def test_advantages_are_shown_next_to_those_of_grpo(doctor: Doctor, file: Path) -> None:
    status, output = doctor("algorithm", f"{file}:centered", "algorithm.gamma=0.5", "+own.bonus=2")
    title, head, *rows, logged = cells(output)
    assert (status, title[0], head[-2:]) == (0, "advantages,", ["centered", "grpo"])
    # Scores 1, 0, 0.5, 1, 0, 0.5, 1, 0 in two groups of four: their mean is 0.5.
    assert [row[3:5] for row in rows] == [
        ["1.000", "0.250"], ["0.000", "-0.250"], ["0.500", "0.000"], ["1.000", "0.250"],
        ["0.000", "-0.250"], ["0.500", "0.000"], ["1.000", "0.250"], ["0.000", "-0.250"],
    ]  # fmt: skip
    # Of grpo: 1 less the mean of 1, 0, 0.5 and 1, over their standard deviation of 0.4787.
    assert rows[0][5] == "0.783"
    assert " ".join(logged) == "logged: algorithm/mean=0.5, algorithm/bonus=2"


def test_a_loss_is_shown_with_its_gradient(doctor: Doctor, file: Path) -> None:
    status, output = doctor("algorithm", f"{file}:plain")
    _, head, *rows = cells(output)
    assert (status, head) == (0, ["response", "advantage", "new/old", "plain", "gradient", "ppo", "gradient"])
    # Log-prob -2 moved by 0.1 along an advantage of 1: the gradient is -1, and ppo's is minus the ratio.
    assert rows[0] == ["0", "1.000", "1.105", "1.900", "-1.000", "-1.105", "-1.105"]


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("broken", [], "advantages is a tensor [8] -> return advantages and returns"),
        ("nothing", [], "mine.py has no function nothing -> it has centered, plain, broken"),
        ("centered", ["algorithm.gama=1"], "unknown key algorithm.gama -> nearest: algorithm.gamma"),
    ],
)
def test_what_a_run_would_reject_is_rejected(doctor: Doctor, file: Path, name: str, words: list[str], message: str):
    status, output = doctor("algorithm", f"{file}:{name}", *words)
    assert status == 1
    assert message in " ".join(output.split())
