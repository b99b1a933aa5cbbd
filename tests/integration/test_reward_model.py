"""A reward model in whole training ranks, against transformers' classifier one row at a time, and in whole runs."""

import json
import math
import random
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from hybridrl.checkpoint.read import read_shards
from hybridrl.core.batch import Batch, token_rows
from hybridrl.core.cluster import Group, spawn
from hybridrl.core.training.learner import LearnerConfig, RankModel
from hybridrl.core.training.losses import pair_objective
from hybridrl.core.training.planning import MicroBatchBudget, MiniBatch, rank_mini_batches
from hybridrl.core.training.worker import TrainWorker
from hybridrl.core.training.worker_group import RankPlan, TrainWorkers
from hybridrl.data.pairs import Pair, pair_batch
from hybridrl.doctor.selftest_resume import MACHINE_METRICS
from hybridrl.runs.ranks import build_models
from hybridrl.runs.reward_model import SCORES
from hybridrl.runs.settings import build_algorithm, build_policy_plan, ppo_worker_config
from tests.core.training.on_ranks import whole_gradient
from tests.integration.test_run import driver_of, finish, metrics, start, validation_keys, wait_for_step

ROWS = 9
LAYOUTS = {1: ["packed"], 2: ["packed", "padded", "sharing"]}  # by number of ranks
SIDES = [("chosen", "02468"), ("rejected", "13579")]


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


class PairRank(TrainWorker):
    """A training rank whose gradients can be read."""

    def gradient(self, batch: Batch, mini_batch: MiniBatch, center: float) -> dict[str, torch.Tensor]:
        return whole_gradient(self.actor, batch, mini_batch, pair_objective(self.actor, center))


@pytest.mark.parametrize("center", [0.0, 0.1])
def test_the_gradient_of_pairs_is_that_of_a_model_in_float64(config, session, classifier, center, tmp_path):
    """On two ranks that share rows, with micro-batches of one pair and more, and margins."""
    some = [row for row in rows(2) if len(row) > 1]
    pairs = [Pair(chosen, rejected, 0.1 * len(chosen)) for chosen, rejected in pairwise(some)]
    batch, actor = pair_batch(pairs), config.actor_rollout_ref.actor
    exact = AutoModelForSequenceClassification.from_pretrained(classifier, dtype=torch.float64, num_labels=1,
                                                               ignore_mismatched_sizes=True)  # fmt: skip
    torch.nn.init.normal_(exact.score.weight)
    exact.config.pad_token_id = None
    exact.save_pretrained(tmp_path)
    scores = torch.stack(
        [exact(torch.tensor([ids])).logits[0, 0] for one in pairs for ids in (one.chosen, one.rejected)]
    )
    gaps = scores[::2] - scores[1::2] - torch.tensor([one.margin for one in pairs])
    loss = (-torch.nn.functional.logsigmoid(gaps) + center * (scores[::2] + scores[1::2]) ** 2).mean()
    loss.backward()
    model = replace(config.actor_rollout_ref.model, path=str(tmp_path))
    fsdp, trained = replace(actor.fsdp_config, fsdp_size=2), LearnerConfig(actor.optim, 1)
    budget = MicroBatchBudget(64)
    worker = ppo_worker_config(config, build_algorithm(config), tmp_path, steps=1)
    worker = replace(worker, models={"actor": RankModel(model, fsdp, budget, "trained score", trained)})
    files = [str(tmp_path / f"{rank}.log") for rank in range(2)]
    actors = [spawn(PairRank, session, rank, {"OMP_NUM_THREADS": "1"}, rank, 2, files[rank]) for rank in range(2)]
    group = Group(actors, "train worker", files)
    build_models(group, worker, 120)
    plans = rank_mini_batches(batch, 2, [range(len(batch))], budget, size=2)
    parts = [(batch, mini_batch, center) for (mini_batch,) in plans]
    found = group.scatter(PairRank.gradient, parts, timeout=120)[0]
    expected = {f"model.{name}": value.grad for name, value in exact.named_parameters()}
    assert found.keys() == expected.keys() and max(len(part.micro_batches) for _, part, _ in parts) > 1
    squares = [[(found[name] - value).square().sum(), value.square().sum()] for name, value in expected.items()]
    distance, norm = torch.tensor(squares).sum(0).sqrt().tolist()
    assert distance <= 1e-5 * norm


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """Pairs of which the better one has even digits: train.jsonl and val.jsonl."""
    directory, generator = tmp_path_factory.mktemp("pairs"), random.Random(0)
    made = [
        {"prompt": f"What is {number}?", **{side: "".join(generator.choices(digits, k=4)) for side, digits in SIDES}}
        for number in range(400)
    ]
    for name, part in (("train", made[:340]), ("val", made[340:])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return directory


def arguments(pairs: Path, tiny: Path, directory: Path, steps: int, **more: object) -> list[str]:
    keys = {"data.train_files": pairs / "train.jsonl", "data.val_files": pairs / "val.jsonl"}
    keys |= {"data.train_batch_size": 32, "data.max_length": 64, "model.path": tiny / "model", "optim.lr": 1e-3}
    keys |= {"trainer.total_training_steps": steps, "trainer.test_freq": steps, "trainer.n_gpus_per_node": 1}
    keys |= {"trainer.default_local_dir": directory, "trainer.logger": "[console]"}
    keys |= {"checkpoint.save_contents": "[model,optimizer,extra,hf_model]"}
    return [f"{key}={value}" for key, value in (keys | more).items()]


def margin(saved: Path, pairs: Path) -> float:
    """The mean difference of scores of the validation pairs, by transformers."""
    scores, tokenizer = [], AutoTokenizer.from_pretrained(saved)
    examples = [json.loads(line) for line in (pairs / "val.jsonl").read_text().splitlines()]
    for side, _ in SIDES:
        chats = [
            [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
            for row in examples
        ]
        scores.append(one_by_one(saved, [tokenizer.apply_chat_template(chat, return_dict=False) for chat in chats]))
    return float((scores[0] - scores[1]).mean())


@pytest.fixture(scope="module")
def trained(tiny, pairs) -> Path:
    """A run that learns to prefer even digits."""
    finish(start("main_rm", arguments(pairs, tiny, pairs / "run", 30)))
    return pairs / "run"


def test_a_trained_reward_model_prefers_what_pairs_do_and_loads_in_transformers_and_vllm(trained, pairs, tmp_path):
    steps, saved = metrics(trained), trained / "global_step_30" / "actor"
    assert steps[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)  # its head starts at zero
    assert steps[30]["val/accuracy"] >= 0.95 and steps[30]["val/loss"] < 0.3
    config = AutoConfig.from_pretrained(saved / "huggingface")
    assert (config.architectures, config.num_labels) == (["Qwen2ForSequenceClassification"], 1)
    assert steps[30]["val/margin"] == pytest.approx(margin(saved / "huggingface", pairs), abs=1e-4)
    merge = ["merge", "--local_dir", str(saved), "--target_dir", str(tmp_path / "merged"), "--verify", "vllm"]
    assert "vllm: values for 8 tokens within" in finish(start("model_merger", merge))
    assert steps[30]["val/margin"] == pytest.approx(margin(tmp_path / "merged", pairs), abs=1e-4)
    assert "hybridrl rm " in (tmp_path / "merged" / "README.md").read_text()


@pytest.mark.drill
def test_adapters_on_two_ranks_that_share_rows_are_resumed_exactly_and_merged(tiny, pairs, tmp_path):
    """With the run of one rank as the reference."""

    def keys(name: str, **more: object) -> list[str]:
        adapter = {"model.lora_rank": 8, "model.lora_alpha": 16, "optim.lr": 1e-2, "trainer.save_freq": 1}
        return arguments(pairs, tiny, tmp_path / name, 8, **adapter | more)

    shared = {"trainer.n_gpus_per_node": 2, "engine.fsdp_config.ulysses_sequence_parallel_size": 2}
    finish(start("main_rm", keys("alone")))
    finish(start("main_rm", keys("whole", **shared)))
    process = start("main_rm", keys("killed", **shared))
    wait_for_step(process, tmp_path / "killed", 3)
    driver_of(process).kill()
    process.communicate(timeout=60)
    assert process.returncode == 137 and "resuming after step" in finish(start("main_rm", keys("killed", **shared)))
    alone, whole, killed = (metrics(tmp_path / name) for name in ("alone", "whole", "killed"))
    for step in range(1, 9):
        names = [name for name in whole[step] if not MACHINE_METRICS.search(name)]
        assert {name: killed[step][name] for name in names} == {name: whole[step][name] for name in names}
        assert whole[step]["train/loss"] == pytest.approx(alone[step]["train/loss"], abs=1e-4)
    saved = [tmp_path / name / "global_step_8" / "actor" for name in ("whole", "killed")]
    expected, actual = (read_shards(directory, section="") for directory in saved)
    assert expected.meta.keys() == actual.meta.keys()
    assert all(torch.equal(expected.read(name), actual.read(name)) for name in expected.meta)
    merge = ["merge", "--local_dir", str(saved[1]), "--target_dir", str(tmp_path / "merged")]
    finish(start("model_merger", merge))
    assert whole[8]["val/margin"] == pytest.approx(margin(tmp_path / "merged", pairs), abs=1e-4)
    base = AutoModelForSequenceClassification.from_pretrained(tiny / "model", num_labels=1)
    peft = PeftModel.from_pretrained(base, saved[1] / "huggingface").merge_and_unload()
    peft.save_pretrained(tmp_path / "peft")
    AutoTokenizer.from_pretrained(tiny / "model").save_pretrained(tmp_path / "peft")
    assert whole[8]["val/margin"] == pytest.approx(margin(tmp_path / "peft", pairs), abs=1e-4)


@pytest.mark.parametrize(
    "function", [pytest.param(None, marks=pytest.mark.drill), Path(__file__).parent / "length_reward.py"]
)
def test_a_run_with_a_trained_reward_model_alone_and_one_with_a_function_too(
    function, overrides, tiny, classifier, trained, tmp_path
):
    classifier = classifier if function else trained / "global_step_30" / "actor" / "huggingface"
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
