"""LoRA with real vLLM and FSDP2: weight sync of adapters and of merged weights, and what stops the run."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hybridrl.checkpoint.read import open_tensors
from hybridrl.config import load_ppo_config
from hybridrl.core.algorithms.algorithm import Signal
from hybridrl.core.hybrid_engine import HybridEngine
from hybridrl.core.training.worker_group import RankPlan, TrainWorkers
from hybridrl.core.weights.sync import StaleWeights
from hybridrl.model_merger.__main__ import main
from hybridrl.runs.ppo import probe_ids, start_devices
from hybridrl.runs.settings import build_algorithm, build_policy_plan, ppo_worker_config, rank_model
from tests.integration.answers import PROMPT, generate, largest_gap, requests, rows, sending, tokens, update
from tests.integration.test_run import finish, metrics, start

pytestmark = pytest.mark.slow
ALL = {"actor": ["model", "optimizer", "extra"]}


@pytest.fixture(scope="module", params=[False, True], ids=["adapter", "merged"])
def parts(request, overrides, session, tmp_path_factory) -> tuple[HybridEngine, TrainWorkers]:
    logs = tmp_path_factory.mktemp("logs")
    model = "actor_rollout_ref.model"
    config = load_ppo_config(overrides(logs, {f"{model}.lora_rank": 8, f"{model}.lora.merge": request.param}))
    worker = ppo_worker_config(config, build_algorithm(config), logs, steps=10)
    worker = replace(worker, models={**worker.models, "reference": rank_model("reference", config)})
    workers, engine = start_devices(config, session, worker, logs, probe_ids(PROMPT))
    return engine, TrainWorkers(workers, RankPlan(worker.models, build_policy_plan(config)), "float32", 120)


def test_rollout_and_training_agree_before_and_after_updates(parts):
    engine, workers = parts
    wanted = requests()
    engine.to_rollout(0)
    before = generate(engine, wanted)
    engine.to_training()
    for step in (1, 2):
        batch = rows(wanted, before)
        assert largest_gap(workers, batch) < 1e-4
        update(workers, batch)
        assert largest_gap(workers, batch) > 0.1, "the update must change the policy for this test to mean anything"
        engine.to_rollout(step)
        after = generate(engine, wanted)
        engine.to_training()
        assert tokens(after) != tokens(before)
        before = after
    assert largest_gap(workers, rows(wanted, before)) < 1e-4


def test_the_reference_is_the_model_without_its_adapter(parts, config):
    engine, workers = parts
    wanted = requests(2)
    engine.to_rollout(2)
    batch = rows(wanted, generate(engine, wanted))
    engine.to_training()
    actual = workers.fill(batch, Signal(("reference_log_probs",), "reference")).reference_log_probs
    base = AutoModelForCausalLM.from_pretrained(config.actor_rollout_ref.model.path, dtype=torch.float32)
    torch.testing.assert_close(actual, log_probs(base, batch), atol=1e-4, rtol=0)
    assert float((actual - workers.forward_log_probs(batch).old_log_probs).abs().max()) > 0.1


def test_a_missing_weight_sync_stops_the_run_however_small_the_update(parts):
    engine, _ = parts
    engine.to_rollout(2)
    engine.to_training()
    stale = pytest.raises(StaleWeights, match="computes with the weights of weight sync")
    with sending(engine, lambda indices: None), stale:
        engine.to_rollout(3)
    engine.to_rollout(3)
    engine.to_training()


def test_an_old_adapter_that_is_sent_as_the_new_one_stops_the_run(parts, tmp_path):
    engine, workers = parts
    wanted = requests(2)
    engine.to_rollout(3)
    responses = generate(engine, wanted)
    engine.to_training()
    save(workers, tmp_path / "old")
    update(workers, rows(wanted, responses))
    save(workers, tmp_path / "new")
    send_all = engine.sync.send_all

    def send_old(indices):
        workers.load(tmp_path / "old", ALL)
        send_all(indices)
        workers.load(tmp_path / "new", ALL)

    stale = pytest.raises(StaleWeights, match="differs from the trainer in the log-probs")
    with sending(engine, send_old), stale:
        engine.to_rollout(4)
    engine.to_rollout(4)
    engine.to_training()


def save(workers: TrainWorkers, directory: Path) -> None:
    workers.start_save(directory, ALL)
    while not workers.finished_save():
        time.sleep(0.01)
    saved = open_tensors(directory / "actor")
    assert saved.meta and all(".lora_" in name for name in saved.meta), "the base is not saved"


def test_a_restarted_engine_gets_base_and_adapter_again(parts):
    engine, workers = parts
    if not engine.sync.plan.adapter:
        pytest.skip("merged weights are tested in test_engine.py")
    wanted = requests(4)
    engine.to_rollout(5)
    undisturbed = tokens(generate(engine, wanted))
    engine.to_training()
    engine.fleet.servers.actors[0].__ray_terminate__.remote()
    engine.to_rollout(6)
    again = generate(engine, wanted)
    engine.to_training()
    assert engine.client.restarts == 1 and tokens(again) == undisturbed
    assert largest_gap(workers, rows(wanted, again)) < 1e-4


def test_after_the_first_weight_sync_only_the_adapter_is_sent(parts, monkeypatch):
    engine, _ = parts
    sent = []
    send = engine.sync.send
    monkeypatch.setattr(
        engine.sync, "send", lambda *call, **kind: sent.append((len(call[0]), kind)) or send(*call, **kind)
    )
    engine.to_rollout(7)
    engine.to_training()
    base, adapter = engine.sync.plan.model, engine.sync.plan.adapter
    assert [count for count, _ in sent if count] == ([len(adapter)] if adapter else [len(base)])
    bytes_of = {
        name: sum(t.bytes for bucket in kind for t in bucket.tensors) for name, kind in vars(engine.sync.plan).items()
    }
    assert bytes_of["adapter"] < bytes_of["model"] / 4


def test_peft_computes_the_same_with_the_exported_adapter(parts, config, tmp_path):
    engine, workers = parts
    wanted = requests(2)
    engine.to_rollout(7)
    batch = rows(wanted, generate(engine, wanted))
    engine.to_training()
    workers.export(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(config.actor_rollout_ref.model.path, dtype=torch.float32)
    expected = log_probs(PeftModel.from_pretrained(base, tmp_path).eval(), batch)
    torch.testing.assert_close(workers.forward_log_probs(batch).old_log_probs, expected, atol=1e-4, rtol=0)
    by_itself = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(log_probs(by_itself, batch), expected, atol=1e-6, rtol=0)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        config.actor_rollout_ref.model.path
    )


@pytest.fixture(scope="module")
def fine_tuned(tiny, tmp_path_factory) -> Path:
    """An adapter from one step of supervised training."""
    directory = tmp_path_factory.mktemp("sft")
    keys = [f"data.train_files={tiny}/warmup.jsonl", f"model.path={tiny}/model", "model.lora_rank=4"]
    keys += [
        "data.train_batch_size=8",
        "data.max_length=128",
        "optim.lr=1e-2",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=1",
    ]
    finish(start("main_sft", [*keys, f"trainer.default_local_dir={directory}"]))
    return directory / "global_step_1" / "actor"


@pytest.mark.drill
def test_a_run_with_adapters_resumes_exactly_from_a_checkpoint_and_is_merged(overrides, tiny, fine_tuned, tmp_path):
    """Policy and critic with adapters, and the exact KL to the base model."""

    def keys(name: str, **more: object) -> list[str]:
        return overrides(
            tmp_path / name,
            {
                "actor_rollout_ref.model.lora_adapter_path": fine_tuned,
                "critic.model.lora_rank": 2,
                "critic.optim.lr": 1e-2,
                "algorithm.adv_estimator": "gae",
                "algorithm.use_kl_in_reward": True,
                "algorithm.kl_penalty": "full",
                "trainer.n_gpus_per_node": 1,
            }
            | more,
        )

    finish(start("main_ppo", keys("uninterrupted")))
    finish(start("main_ppo", keys("resumed", **{"trainer.total_training_steps": 1})))
    output = finish(start("main_ppo", keys("resumed")))
    assert "after step 1" in output and "rank 4 on" in output
    expected, actual = (metrics(tmp_path / name) for name in ("uninterrupted", "resumed"))
    assert expected[1]["actor/reward_kl_penalty"] > 1e-3, "the adapter is trained, and the base is the reference"
    for step in (1, 2):
        names = [name for name in expected[step] if not name.startswith(("timing", "perf/", "rollout/"))]
        assert {name: actual[step][name] for name in names} == {name: expected[step][name] for name in names}
        assert actual[step]["training/log_probs_diff_max"] < 1e-4
    for model in ("actor", "critic"):
        one, other = (open_tensors(tmp_path / name / "global_step_2" / model) for name in ("uninterrupted", "resumed"))
        assert one.meta.keys() == other.meta.keys()
        assert all(torch.equal(one.read(name), other.read(name)) for name in one.meta)
        merged = [
            "merge",
            "--local_dir",
            f"{tmp_path}/resumed/global_step_2/{model}",
            "--target_dir",
            f"{tmp_path}/{model}",
        ]
        assert main(merged) == 0
    step = tmp_path / "resumed" / "global_step_2" / "actor" / "huggingface"
    base = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    expected = PeftModel.from_pretrained(base, step).merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "actor").state_dict()
    assert all(torch.allclose(merged[name], expected[name], atol=1e-6) for name in merged)


@torch.no_grad()
def log_probs(model, batch) -> torch.Tensor:
    log_probs_ = []
    for number in range(len(batch)):
        row = batch.select([number])
        logits = model(torch.cat([row.prompt_ids, row.response_ids])[None]).logits[0].float()
        row_logits = logits[len(row.prompt_ids) - 1 : -1].log_softmax(-1)
        log_probs_.append(row_logits.gather(-1, row.response_ids[:, None]).squeeze(-1))
    return torch.cat(log_probs_)
