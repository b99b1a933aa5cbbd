"""What every run sets up: directories, plans, and what is rejected once tokenizer and data are loaded."""

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import Qwen2Config

from hybridrl.checkpoint.store import Store
from hybridrl.config import ConfigError
from hybridrl.config.load import load_sft_config
from hybridrl.core.training.learner import RankModel
from hybridrl.core.training.planning import MicroBatchBudget, UpdatePlan
from hybridrl.core.training.worker_group import CriticPlan, PolicyPlan, RankPlan
from hybridrl.data.tokenizer import TokenRows
from hybridrl.required import required
from hybridrl.runs import setup
from hybridrl.runs.ppo import probe_ids
from hybridrl.runs.prepare import reject_unknown_tokens
from hybridrl.runs.ranks import fitting_plan
from hybridrl.runs.setup import open_checkpoints, open_directory
from tests.core.training.families import model_config
from tests.sections import keys_of_run


def test_a_second_run_in_a_directory_leaves_the_first_ones_configuration(tmp_path):
    rows, _, device = keys_of_run(tmp_path)

    def config(seed: int):
        values = [f"model.path={tmp_path}", f"trainer.seed={seed}", f"trainer.default_local_dir={tmp_path}"]
        return load_sft_config([rows, device, *values])

    first = open_checkpoints(config(1).trainer, tmp_path)
    with pytest.raises(ConfigError, match="another run is using it"):
        open_checkpoints(config(2).trainer, tmp_path)
    first.close()


class RaySession:
    """A Ray that notes what is done with it."""

    def __init__(self, *_: object) -> None:
        self.events: list[str] = []

    def renew(self) -> None:
        self.events.append("renew")

    def close(self) -> None:
        self.events.append("close")


def test_one_ray_serves_run_after_run_until_one_fails(session_start):
    session_start(RaySession)
    trainer, sessions = SimpleNamespace(device="cpu", nnodes=1, n_gpus_per_node=1), cast("Any", setup.Sessions())
    for _ in range(3):
        with sessions.open(trainer, {}, {}) as session:
            pass
    with pytest.raises(RuntimeError), sessions.open(trainer, {}, {}):
        raise RuntimeError("the run failed")
    assert session.events == ["renew", "renew", "renew", "close"]
    with sessions.open(trainer, {}, {}) as following:
        assert following is not session and not following.events


@dataclass
class Rows:
    largest_id: int


@pytest.fixture
def model(tmp_path: Path) -> str:
    Qwen2Config(vocab_size=64, eos_token_id=2, bos_token_id=1).save_pretrained(tmp_path)
    return str(tmp_path)


def test_rows_with_a_token_that_the_model_does_not_have_are_rejected(model: str) -> None:
    with pytest.raises(ConfigError, match=r"model.path=.* has 64 tokens, and the data has token 64"):
        reject_unknown_tokens(model_config(model), "model.path", Rows(3), Rows(64))


def test_a_model_with_more_rows_than_its_tokenizer_has_tokens_passes(model: str) -> None:
    reject_unknown_tokens(model_config(model), "model.path", Rows(63), None)


def test_the_largest_token_is_that_of_all_rows() -> None:
    rows = TokenRows()
    assert rows.largest == -1
    for row in ([3, 9], [], [4]):
        rows.append(row)
    assert rows.largest == 9


class Ranks:
    """Training ranks that report whether the rows of their models are padded, or share tokens."""

    def __init__(self, **layouts: str) -> None:
        kinds = {"padded": (True, False), "alone": (False, False), "sharing": (False, True)}
        self.layouts = {
            name: dict(zip(("padded", "shares"), kinds[kind], strict=True)) for name, kind in layouts.items()
        }

    def broadcast(self, method: object, timeout: float) -> list[dict[str, dict[str, bool]]]:
        return [self.layouts, self.layouts]


def test_plans_fit_what_the_layers_of_a_family_allow(capsys) -> None:
    """Rows are padded if they mix packed rows, and computed whole if they mix rows that share tokens."""
    budget = MicroBatchBudget(tokens=64)
    updates = UpdatePlan(prompts_per_update=1, epochs=1, shuffle=False, seed=0, budget=budget)
    model = RankModel(None, None, budget)
    plan = RankPlan({"actor": model, "critic": model}, PolicyPlan(None, updates), CriticPlan(None, updates))
    assert fitting_plan(Ranks(actor="sharing", critic="sharing"), plan, 1) == plan
    assert not capsys.readouterr().out
    padded = fitting_plan(Ranks(actor="padded", critic="sharing"), plan, 1)
    assert padded.models["actor"].budget.padded and padded.policy.updates.budget.padded
    assert padded.critic == plan.critic and padded.models["critic"] == model
    assert capsys.readouterr().out.count("actor: its layers mix packed rows") == 1
    policy_alone = RankPlan({"actor": padded.models["actor"]}, padded.policy)
    assert fitting_plan(Ranks(actor="padded"), policy_alone, 1) == policy_alone
    assert not capsys.readouterr().out
    whole = fitting_plan(Ranks(actor="sharing", critic="alone"), plan, 1)
    assert not whole.models["critic"].budget.shares and not required(whole.critic).updates.budget.shares
    assert whole.policy == plan.policy
    assert capsys.readouterr().out.count("critic: dropout is active, or its layers mix rows that share tokens") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_rejected(tmp_path):
    (tmp_path / "logs").mkdir()
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot be written"):
        open_directory(tmp_path, "eval.output_dir")


@pytest.mark.parametrize(("context", "expected"), [(48, [2, 3] * 12), (24, [3, *[2, 3] * 11]), (2, [3])])
def test_the_probe_of_a_weight_sync_and_the_token_after_it_fit_in_the_engine_s_context(context, expected):
    assert probe_ids([2, 3], context) == expected


@pytest.mark.parametrize("folder", ["actor", "critic"])
def test_a_run_ends_with_the_command_that_talks_to_its_model_if_it_saved_one(tmp_path, monkeypatch, capsys, folder):
    def save(*_: object, **__: object) -> None:
        with closing(Store(tmp_path)) as store:
            (store.begin(3) / folder).mkdir()
            store.publish(3, {"healthy": True, "recovery": False, "metrics": {}})

    rows, _, device = keys_of_run(tmp_path)
    config = load_sft_config([rows, device, f"model.path={tmp_path}", f"trainer.default_local_dir={tmp_path}"])
    monkeypatch.setattr(setup, "run", save)
    setup.train(config, cast("Any", None), setup.Sessions())
    last = f"to talk to the model: hybridrl chat {tmp_path}"
    assert (capsys.readouterr().out.splitlines()[-1:] == [last]) == (folder == "actor")
