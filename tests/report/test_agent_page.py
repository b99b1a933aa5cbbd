"""The page of an agent's run: what the environment and the chat template write is no fault of the policy."""

import json
import re
from pathlib import Path

import numpy as np

from hybridrl.agents.environments.conversations import conversation_metrics
from hybridrl.core.algorithms import Algorithm
from hybridrl.core.algorithms.batch_metrics import batch_metrics
from hybridrl.core.algorithms.estimators import grpo
from hybridrl.core.experience.batching import to_batch
from hybridrl.core.experience.trajectory import Episode, Trajectory, Turn
from hybridrl.data.prompts import Prompt
from hybridrl.report import write_report
from hybridrl.rewards.score import Score
from tests.report.synthetic import conversation, write_run

LOW = [60, 61, 62, 63, 64, 65, 66, 67, 68, 69]  # the end of a turn, "user", "low" and "assistant"
END = 2


def game(prompt: int, sample: int, guesses: int, score: float) -> Episode:
    """A game of some guesses, to each of which but the last the environment answers in ten tokens."""
    turns = []
    for number in range(guesses):
        sampled = np.array([10 + prompt, 20 + number, END])
        log_probs = np.full(3, -0.5, dtype=np.float32)
        turns.append(Turn(LOW if number else [1, 1, 1], sampled, log_probs, 0, "stop"))
    row = Prompt(prompt, [1, 1, 1], "?", "games", "7", {})
    return Episode(row, prompt, sample, Trajectory(turns, text=""), "", Score(score))


def agent_run(directory: Path) -> Path:
    """Write a run of twelve steps in which the games are won more and more often."""
    write_run(directory, steps=12, record=conversation)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    algorithm = Algorithm(lambda batch: grpo(batch, norm_adv_by_std_in_grpo=False))
    for step, line in enumerate(lines):
        if not step:
            continue
        won = [[4 * prompt + sample < step + 3 for sample in range(4)] for prompt in range(4)]
        groups = [[game(prompt, sample, 5, float(won[prompt][sample])) for sample in range(4)] for prompt in range(4)]
        batch = algorithm.advantages(to_batch(groups))[0]
        line |= batch_metrics(batch) | conversation_metrics([one for group in groups for one in group])
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for path in (directory / "rollouts").iterdir():  # without the one that could not be graded
        kept = [line for line in path.read_text().splitlines() if "timeout" not in line]
        path.write_text("".join(f"{line}\n" for line in kept))
    return directory


def test_every_light_of_an_agent_that_learns_is_green(tmp_path: Path) -> None:
    page = write_report([agent_run(tmp_path / "run")], tmp_path / "page.html").read_text()
    lights = re.findall(r'<li class="light (\w+)">.*?<strong>(.*?)</strong><p>(.*?)</p>', page)
    assert [(state, question) for state, question, reason in lights] == [
        ("good", question)
        for question in (
            "Does it learn?",
            "Is it stable?",
            "Are the samples usable?",
            "Are the devices busy?",
            "Is it resumable?",
        )
    ], lights
    assert "0% repeated 4-grams" in lights[2][2]


def test_the_page_shows_what_was_observed_as_a_line_of_its_own(tmp_path: Path) -> None:
    page = write_report([agent_run(tmp_path / "run")], tmp_path / "page.html").read_text()
    data = json.JSONDecoder().raw_decode(page.partition('id="data">')[2])[0]
    lengths = {name: data["runs"][0]["series"][name]["y"][-1] for name in ("response_length/mean",)}
    assert lengths == {"response_length/mean": 15.0}  # five guesses of three tokens
    assert data["runs"][0]["series"]["episode/observed_tokens/mean"]["y"][-1] == 40.0
