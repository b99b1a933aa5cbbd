"""A run whose reward is a judge: killed and resumed, it requests no verdict twice."""

import json
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridrl.config.judge import BEGIN, END
from hybridrl.doctor.__main__ import command
from tests.integration.test_resume import victim
from tests.integration.test_run import finish, metrics, start, wait_for_step
from tests.rewards.judge_server import Reply, serving

pytestmark = pytest.mark.slow

STEPS, ANSWERED = 5, 10  # of a run, and replies in a step before it is killed


@pytest.fixture
def arguments(overrides) -> Callable[..., list[str]]:
    def build(directory: Path, url: str) -> list[str]:
        judge = {"base_url": url, "model": "critic", "retries": 0, "timeout": 60}
        more = {f"reward.judge.{name}": value for name, value in judge.items()} | {
            "reward.custom_reward_function.path": "null",
            "reward.num_workers": 2,
            "trainer.n_gpus_per_node": 1,
            "trainer.total_training_steps": STEPS,
            "trainer.save_freq": 1,
            "trainer.rollout_data_dir": directory / "rollouts",
            "actor_rollout_ref.actor.checkpoint.save_contents": "[model,optimizer,extra]",
        }
        return overrides(directory, more)

    return build


def shown(user: str) -> tuple[str, str]:
    """The prompt and the response of a request."""
    prompt, _, rest = user.removeprefix("Prompt:\n").partition(f"\n\nResponse:\n{BEGIN}\n")
    return prompt, rest.partition(f"\n{END}")[0]


def responses(directory: Path) -> set[tuple[str, str]]:
    """The prompts and responses of all steps; the trial of the reward has others."""
    lines = (line for file in directory.glob("rollouts/*.jsonl") for line in file.read_text().splitlines())
    return {(sample["input"].removeprefix("user: "), sample["output"]) for sample in map(json.loads, lines)}


@pytest.mark.drill
def test_a_run_that_is_killed_in_three_steps_requests_only_what_was_in_progress_again(arguments, tmp_path):
    run, stalled, left = tmp_path / "run", list[str](), sys.maxsize  # replies until the server stalls

    def reply(number: int, body: dict) -> Reply:
        nonlocal left
        user = body["messages"][-1]["content"]
        left -= 1
        if left < 0:
            stalled.append(user)
            return Reply(fails="stall")
        return Reply("VERDICT: yes" if zlib.crc32(user.encode()) % 2 else "VERDICT: no")

    with serving(reply) as server:
        for step in range(1, STEPS - 1):
            process, before = start("main_ppo", arguments(run, server.url)), len(stalled)
            wait_for_step(process, run, step)
            left = ANSWERED  # of the next step
            while len(stalled) == before:
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.1)
            time.sleep(1)
            victim(process, "driver").kill()
            process.communicate(timeout=60)
            left = sys.maxsize
            cache = run / "judge.jsonl"
            cache.write_bytes(cache.read_bytes() + cache.read_bytes().splitlines()[-1][:-9])  # a line cut short
        finish(start("main_ppo", arguments(run, server.url)))
        requests, of_run = Counter(server.users()), responses(run)
        twice = [user for user in requests.elements() if shown(user) in of_run]
        assert len(stalled) >= STEPS - 2 and Counter(twice) - Counter(set(twice)) == Counter(stalled)
        assert command("rescore", [str(run)]) == 0 and requests == Counter(
            server.users()
        )  # a second scoring requests nothing
    steps = metrics(run)
    for step in range(1, STEPS + 1):
        assert (steps[step]["reward/faults"], steps[step]["judge/unparsed"]) == (0, 0)
