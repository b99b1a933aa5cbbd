"""Plug-ins of another distribution: an engine with a field that a loss reads, a frozen model that a loss term compares
with the policy, a reward manager, rows, a trial and commands."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridrl.plugins import PLUGINS, additions, load, names

ENTRIES = """[hybridrl.plugins]
engine.mine = mine.engine:ENTRY
reward_manager.doubled = mine.rewards:doubled
carried.doubt = mine.losses:DOUBT
carried.first_log_probs = mine.models:FIELD
model.first = mine.models:first
signal.first_log_probs = mine.models:SIGNAL
term.pull = mine.models:PULL
command.greet = mine.greet
rows.counted = mine.rows:files
doctor.count = mine.checks:COUNT
trial.mine = mine.trial:TRIAL
page = mine.greet:page
"""
ENGINE = """
from dataclasses import replace

import numpy as np

from hybridrl.core.rollout.engine import EngineEntry
from hybridrl.core.rollout.vllm.engine import VllmEngine
from hybridrl.core.rollout.vllm.settings import vllm_environment

class Engine(VllmEngine):
    async def connect(self):
        await super().connect()
        print("an engine of another distribution", flush=True)

    async def generate(self, request):
        completion = await super().generate(request)
        return replace(completion, carried={"doubt": np.arange(len(completion.token_ids)) + 0.25})

ENTRY = EngineEntry("mine.engine", "Engine", vllm_environment)
"""
LOSSES = """
from hybridrl.core.carried import Carried

DOUBT = Carried("response", join="concatenate", absent=-1.0)

def doubted(log_probs, rows):
    doubt = rows.carried["doubt"]
    return -log_probs * rows.advantages, {"doubt": doubt - doubt.floor()}

doubted.reads = ("doubt",)
doubted.terms = ("pull",)
"""
MODELS = """
from hybridrl.config.catalog import LossTerm
from hybridrl.core.algorithms.algorithm import Signal
from hybridrl.core.carried import Carried
from hybridrl.runs.settings import rank_model

FIELD = Carried("response", stored=False, filled_by="batch")
SIGNAL = Signal(("first_log_probs",), "first")
PULL = LossTerm("pull", "mine.models:pull", 0.5, reads=("first_log_probs",), against="first")

def first(config):
    return rank_model("reference", config)

def pull(outputs, rows):
    gap = outputs.log_probs.detach() - rows.carried["first_log_probs"]
    return outputs.reference_kl, {"gap_to_first": gap.abs()}
"""
REWARDS = """
def doubled(solution_str, compute_score):
    return 2 * compute_score(solution_str)
"""
SCRIPT = """
import asyncio
import sys
from functools import partial

import numpy as np

from hybridrl.config import load_ppo_config
from hybridrl.core.rollout import Completion
from hybridrl.runs.ppo import PPOJob
from hybridrl.runs.setup import Sessions, train

class Scripted:
    def __init__(self, client):
        self.client = client

    def __getattr__(self, name):
        return getattr(self.client, name)

    def generate(self, request, begun=None):
        future = asyncio.get_running_loop().create_future()
        tokens = np.full(2 + request.sample, 5)
        future.set_result(Completion(tokens, np.full(len(tokens), -0.5, np.float32), False, 0))
        return future

if __name__ == "__main__":
    train(load_ppo_config(sys.argv[1:]), partial(PPOJob, wrap_client=Scripted), Sessions())
"""
GREET = """
import sys

page = "another page"
if __name__ == "__main__":
    print("greetings to", *sys.argv[1:])
"""
ROWS = """
import json
from pathlib import Path

def files(rest):
    file = Path(f"{int(rest)}_rows.jsonl")
    prompts = [{"prompt": f"question {number}"} for number in range(int(rest))]
    file.write_text("".join(json.dumps(row) + chr(10) for row in prompts))
    return [file]
"""
CHECKS = """
from hybridrl.config import ConfigError
from hybridrl.doctor import Command, argument

def run(options):
    if options.number > 9:
        raise ConfigError(f"{options.number} is too large", fix="name a digit")
    print("counting")
    return {"counted": options.number}

COUNT = Command("N: counts to N", [argument("number", type=int)], run)
"""
TRIAL = """
from hybridrl.runs.trials import Trial

TRIAL = Trial("a key", lambda subject: True, lambda subject, findings: findings.warn("mine", "tried"))
"""
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run Python with the distribution installed; returns its output."""
    package, about = tmp_path / "site" / "mine", tmp_path / "site" / "mine-1.0.dist-info"
    package.mkdir(parents=True)
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRIES)
    codes = {"engine": ENGINE, "losses": LOSSES, "models": MODELS, "rewards": REWARDS, "greet": GREET, "rows": ROWS}
    files = {"__init__": "", **codes, "script": SCRIPT, "trial": TRIAL, "checks": CHECKS}
    for name, code in files.items():
        (package / f"{name}.py").write_text(code)

    def started(*arguments: str) -> str:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(package.parent), *sys.path])}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=280)
        return done.stdout + done.stderr

    return started


def test_names_are_those_of_all_distributions_and_an_entry_replaces_ours(run: Run) -> None:
    code = "from hybridrl.plugins import load, names; print(names('engine'), names('command'), load('page'))"
    assert run("-c", code) == "['sglang', 'vllm', 'mine'] ['greet'] another page\n"
    assert names("engine") == ["sglang", "vllm"] and names("command") == []


def test_a_command_is_run_by_its_name(run: Run) -> None:
    assert run("-m", "hybridrl", "greet", "a", "--b") == "greetings to a --b\n"
    assert "there is no command greeet; greet?" in run("-m", "hybridrl", "greeet")
    assert "greet" in run("-m", "hybridrl", "--help")


def test_a_plug_in_takes_the_place_of_no_command(run: Run) -> None:
    code = "from hybridrl.plugins import additions as of; print(of('command', ['train']), of('command', ['greet']))"
    assert run("-c", code) == "{'greet': 'mine.greet'} {}\n" and additions("command", []) == {}


def test_a_command_of_the_doctor_is_listed_and_imported_only_if_it_is_named(run: Run) -> None:
    assert run("-m", "hybridrl.doctor", "count", "3") == "counted  3\ncounting\n"
    assert json.loads(run("-m", "hybridrl.doctor", "count", "3", "--json").removesuffix("counting\n")) == {"counted": 3}
    assert run("-m", "hybridrl", "doctor", "count", "12") == "error: 12 is too large; name a digit\n"
    assert "count mine.checks:COUNT" in run("-m", "hybridrl", "doctor", "--help")
    code = "import sys; from hybridrl.doctor.__main__ import command; command('explain', ['seed']); print(*sys.modules)"
    assert "mine" not in run("-c", code).split()


def test_a_trial_is_run_if_another_name_of_its_distribution_is_asked_for(run: Run) -> None:
    code = """
import sys
from hybridrl.config import PPOConfig
from hybridrl.config.compose import SHIPPED
from hybridrl.config.findings import Findings
from hybridrl.config.load import resolve_config
from hybridrl.plugins import load
from hybridrl.runs.trials import Subject, run_trials

def tried(*keys):
    keys = ["data.train_files=rows.jsonl", "actor_rollout_ref.model.path=some/model", *keys]
    config = resolve_config(PPOConfig, keys, SHIPPED[PPOConfig], offline=True).accept()
    run_trials(Subject(config, object()), findings := Findings())
    return [finding.code for finding in findings.items]

load("page")  # replaces hybridrl's
print(tried(), "mine.trial" in sys.modules, tried("actor_rollout_ref.rollout.name=mine"), tried())
print(tried("reward.reward_manager.name=doubled"), tried(), load("carried.doubt").axis, tried())
"""
    assert run("-c", code) == "[] False ['mine'] []\n['mine'] [] response ['mine']\n"


def test_an_entry_with_a_scheme_is_read_by_the_plug_in_of_its_name(run: Run, tmp_path: Path) -> None:
    code = """
import sys
from hybridrl.config.files import row_entries
from hybridrl.data.rows import Faults, load_rows
rule = row_entries([sys.argv[1]])
print(rule)
print([row.values for row in load_rows([sys.argv[1]], Faults("f"), key="f", max_samples=-1, shuffle=False, seed=0)])
"""
    read = "None\n[{'prompt': 'question 0'}, {'prompt': 'question 1'}]\n"
    assert run("-c", code, "counted:2") == read
    cause = "f=counted:two: the plug-in rows.counted failed (ValueError: invalid literal for int()"
    assert cause in run("-c", code, "counted:two")
    assert "there is no file other:2" in run("-c", code, "other:2")
    (tmp_path / "counted:2").write_text("a file of that name is read itself")
    assert "files of rows end in" in run("-c", code, "counted:2")


@pytest.mark.parametrize("name", PLUGINS)
def test_every_name_of_the_table_stands_for_something(name: str) -> None:
    assert load(name) is not None


@pytest.mark.drill
def test_a_run_has_the_engine_the_reward_manager_and_the_frozen_model(run: Run, overrides, tmp_path: Path) -> None:
    keys = {"actor_rollout_ref.rollout.name": "mine", "reward.reward_manager.name": "doubled"}
    keys["actor_rollout_ref.actor.policy_loss.loss_mode"] = f"{tmp_path}/site/mine/losses.py:doubted"
    steps = {"trainer.total_training_steps": 2, "trainer.n_gpus_per_node": 1}
    plain = run("-m", "hybridrl.main_ppo", *overrides(tmp_path / "plain", steps))
    other = run("-m", "hybridrl.main_ppo", *overrides(tmp_path / "other", steps | keys))
    engine = "an engine of another distribution"
    assert "reward" in plain and (tmp_path / "other" / "logs" / "rollout-0.log").is_file(), plain + other
    assert engine in (tmp_path / "other" / "logs" / "rollout-0.log").read_text()
    (ours, _), (theirs, after) = (metrics(tmp_path / name) for name in ("plain", "other"))
    assert theirs["critic/score/mean"] == pytest.approx(2 * ours["critic/score/mean"]) and ours["critic/score/mean"] > 0
    assert theirs["actor/doubt"] == pytest.approx(0.25) and "actor/doubt" not in ours
    assert theirs["actor/pull_loss"] == pytest.approx(0.0, abs=1e-6) and "actor/pull_loss" not in ours
    assert theirs["actor/gap_to_first"] < 1e-5 and theirs["timing_s/first_log_probs"] > 0
    assert after["actor/pull_loss"] > 1e-4 and after["actor/gap_to_first"] > 1e-3
    unknown = run("-m", "hybridrl.main_ppo", *overrides(tmp_path / "unknown", {"actor_rollout_ref.rollout.name": "me"}))
    assert "actor_rollout_ref.rollout.name=me: choose sglang | vllm | mine" in unknown


@pytest.mark.drill
def test_a_run_samples_from_a_wrapper_of_its_client(run: Run, overrides, tmp_path: Path) -> None:
    steps = {"trainer.total_training_steps": 1, "trainer.n_gpus_per_node": 1}
    steps["actor_rollout_ref.rollout.max_log_prob_gap"] = 100  # the script's log-probs are not the policy's
    output = run("-m", "mine.script", *overrides(tmp_path / "scripted", steps))
    (first,) = metrics(tmp_path / "scripted")
    assert (first["response_length/min"], first["response_length/max"]) == (2, 5), output
    assert "rollout/generated_tokens" not in first


def metrics(directory: Path) -> list[dict[str, float]]:
    """The metrics of the steps."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [step for step in map(json.loads, lines) if "critic/score/mean" in step]
