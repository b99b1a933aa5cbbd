"""A reward model in whole training ranks, against transformers' classifier one row at a time, and in whole runs."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from hybridrl.core.batch import token_rows
from hybridrl.core.cluster import Group, spawn
from hybridrl.core.training.worker import TrainWorker
from hybridrl.core.training.worker_group import RankPlan, TrainWorkers
from hybridrl.runs.ranks import build_models
from hybridrl.runs.reward_model import SCORES
from hybridrl.runs.settings import build_algorithm, build_policy_plan, ppo_worker_config
from tests.integration.test_run import finish, metrics, start, validation_keys

ROWS = 9
LAYOUTS = {1: ["packed"], 2: ["packed", "padded", "sharing"]}  # by number of ranks


@pytest.fixture(scope="module")
def classifier(tiny, tmp_path_factory) -> Path:
    """A reward model with two labels, of the quickstart's family and tokenizer, which pads with its eos."""
    path, tokenizer = tmp_path_factory.mktemp("classifier"), AutoTokenizer.from_pretrained(tiny / "model")
    settings = AutoConfig.from_pretrained(tiny / "model")
    settings.num_labels, settings.initializer_range, settings.pad_token_id = 2, 0.1, settings.eos_token_id
    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_config(settings).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def rows(padding: int) -> list[list[int]]:
    """Rows of 1 to 40 tokens, with the padding id inside and at the end of some."""
    generator = torch.Generator().manual_seed(0)
    sizes = [1, *torch.randint(2, 41, (ROWS - 1,), generator=generator).tolist()]
    made = [torch.randint(3, 280, (size,), generator=generator).tolist() for size in sizes]
    made[2][1] = made[2][-1] = made[5][-1] = padding
    return made


@torch.no_grad()
def one_by_one(directory: Path, some: list[list[int]]) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(directory, attn_implementation="eager")
    model.config.pad_token_id = None  # else it looks for the last token that is none
    return torch.stack([model(torch.tensor([row])).logits[0, -1] for row in some])


@pytest.fixture(scope="module")
def workers(config, session, classifier, tmp_path_factory) -> dict[str, TrainWorkers]:
    """One rank, and two with the same model in each layout."""
    built, logs, settings = {}, tmp_path_factory.mktemp("logs"), deepcopy(config)
    settings.reward.reward_model.enable, settings.reward.reward_model.model_path = True, str(classifier)
    settings.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu = 64  # several micro-batches
    worker = ppo_worker_config(settings, build_algorithm(settings), logs, steps=1)
    for ranks, layouts in LAYOUTS.items():
        whole = worker.models["reward_model"]
        whole = replace(whole, fsdp=replace(whole.fsdp, fsdp_size=ranks))
        sharing = replace(whole.fsdp, ulysses_sequence_parallel_size=2)
        padded = replace(whole, model=replace(whole.model, use_remove_padding=False))
        models = {
            "packed": whole,
            "padded": replace(padded, budget=replace(padded.budget, padded=True)),
            "sharing": replace(whole, fsdp=sharing, budget=replace(whole.budget, devices=2)),
        }
        files = [str(logs / f"{ranks}-{rank}.log") for rank in range(ranks)]
        actors = [spawn(TrainWorker, session, r, {"OMP_NUM_THREADS": "1"}, r, ranks, files[r]) for r in range(ranks)]
        group, models = Group(actors, "train worker", files), {name: models[name] for name in layouts}
        build_models(group, replace(worker, models=models), 120)
        built[ranks] = TrainWorkers(group, RankPlan(models, build_policy_plan(settings)), "float32", 120)
    return built


@pytest.mark.parametrize(("ranks", "layout"), [(ranks, layout) for ranks in LAYOUTS for layout in LAYOUTS[ranks]])
def test_scores_are_those_of_transformers_classifier_one_row_at_a_time(workers, classifier, ranks, layout):
    some = rows(AutoTokenizer.from_pretrained(classifier).eos_token_id)
    batch, signal = token_rows(some, slice(-1, None)), replace(SCORES, model=layout)
    actual, expected = workers[ranks].fill(batch, signal).values, one_by_one(classifier, some)
    assert expected.std() > 0.1
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    alone = [workers[ranks].fill(batch.select([row]), signal).values for row in (0, ROWS - 1)]
    torch.testing.assert_close(torch.cat(alone), actual[[0, -1]], atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("function", [None, Path(__file__).parent / "length_reward.py"])
def test_a_run_with_a_reward_model_alone_and_one_next_to_a_function(function, overrides, tiny, classifier, tmp_path):
    more = validation_keys(tiny) | {
        "reward.custom_reward_function.path": function or "null",
        "reward.reward_model.enable": True,
        "reward.reward_model.model_path": classifier,
        "reward.reward_model.weight": 0.5,
        "trainer.n_gpus_per_node": 1,
        "trainer.rollout_data_dir": tmp_path / "samples",
        "trainer.validation_data_dir": tmp_path / "validation",
        "trainer.test_freq": 2,
        "trainer.val_before_train": False,
    }
    finish(start("main_ppo", overrides(tmp_path, more)))
    tokenizer, scored = AutoTokenizer.from_pretrained(classifier), metrics(tmp_path)
    for file in (
        tmp_path / "samples" / "1.jsonl",
        tmp_path / "samples" / "2.jsonl",
        tmp_path / "validation" / "2.jsonl",
    ):
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        chats = [[{"role": "user", "content": sample["input"].removeprefix("user: ")},
                  {"role": "assistant", "content": sample["output"]}] for sample in samples]  # fmt: skip
        ids = [tokenizer.apply_chat_template(chat, return_dict=False) for chat in chats]
        expected, actual = one_by_one(classifier, ids), torch.tensor([sample["reward_model"] for sample in samples])
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        shares = [len(set(sample["output"])) / max(len(sample["output"]), 1) for sample in samples]
        totals = 0.5 * actual + (torch.tensor(shares) if function else 0)
        torch.testing.assert_close(torch.tensor([sample["score"] for sample in samples]), totals)
        if file.parent.name == "samples":
            step = scored[int(file.stem)]
            assert step["reward/reward_model/mean"] == pytest.approx(float(actual.mean()), abs=1e-5)
            assert step["critic/score/mean"] == pytest.approx(float(totals.mean()), abs=1e-5)
            assert step["timing_s/reward_model"] > 0
    kind = "aux" if function else "core"  # the function's own `acc` is the main value
    assert scored[2][f"val-{kind}/quickstart/addition/reward/mean@2"] == pytest.approx(float(totals.mean()), abs=1e-5)
