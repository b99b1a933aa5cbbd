"""A run whose reward, keys and environment are full of secrets, and what leaves the machine of it."""

import re
import tarfile

import pytest

from tests.integration.test_run import finish, start
from tests.tracking.test_secrets import FORMS, C

KEYS = [
    "api_key",
    "judge_key",
    "clientSecret",
    "refreshToken",
    "password",
    "DB_PASS",
    "authorization",
    "webhook",
    "x_api_key",
]
VARIABLES = ["WANDB_API_KEY", "HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_SECRET", "GH_PAT"]
PREFIX = C[:3]
CANARY = re.compile(rf"{PREFIX}\d{{3}}{C[6:]}")
REWARD = """
FORMS, calls = {forms!r}, 0
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **options):
    global calls
    calls += 1
    print(FORMS[calls % len(FORMS)])
    if calls % 2:
        raise ValueError(FORMS[calls % len(FORMS)])
    return float(len(solution_str))
"""


def canary(number: int) -> str:
    return f"{PREFIX}{number:03d}{C[6:]}"


@pytest.mark.slow
def test_no_secret_is_in_what_is_shown_sent_or_packed(overrides, tmp_path):
    reward, out = tmp_path / "reward.py", tmp_path / "run"
    forms = [form.replace(C, canary(number)) for number, form in enumerate(FORMS)]
    reward.write_text(REWARD.format(forms=forms))
    more = {"actor_rollout_ref.rollout.n": 24, "trainer.n_gpus_per_node": 1}
    more["reward.custom_reward_function.path"] = reward
    more |= {"trainer.logger": "[console,tensorboard,wandb]", "reward.max_fault_rate": 0.9}
    more |= {f"+reward.custom_reward_function.reward_kwargs.{key}": canary(n) for n, key in enumerate(KEYS, 200)}
    environment = {name: 2 * canary(number) for number, name in enumerate(VARIABLES, 300)}
    environment |= {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    shown = finish(start("main_ppo", overrides(out, more), **environment))
    for command in (["why"], ["checkpoints"], ["bundle", "--samples", "--out", str(tmp_path / "packed.tar.gz")]):
        shown += finish(start("doctor", [command[0], str(out), *command[1:]], **environment))
    assert "api_key: ***" in shown and CANARY.findall(shown) == []
    with tarfile.open(tmp_path / "packed.tar.gz") as archive:
        archive.extractall(tmp_path / "packed", filter="data")

    written = {path.relative_to(tmp_path): path.read_text(errors="replace") for path in tmp_path.rglob("*.*")}
    assert {".wandb", ".html", ".log", ".jsonl"} <= {path.suffix for path in written}
    found = {str(path) for path, text in written.items() if CANARY.search(text)}
    own = {"reward.py", "run/config.yaml", "run/logs/reward.log", "run/rollouts/1.jsonl", "run/rollouts/2.jsonl"}
    assert {path for path in found if "global_step" not in path} == own, "files of the run that only its user reads"
