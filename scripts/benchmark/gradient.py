"""Gradient of a mini-batch of the pretrained recipe as a training rank computes it, against transformers in float64:

python scripts/benchmark/gradient.py --model DIR [key=value ...]

One rank is built as in a run, and computes the policy's loss for eight answers with fixed advantages, in the
micro-batches of the run. transformers computes the same loss row by row from its own logits, in float64 throughout.
Prints the relative error of the gradient as a whole, and the parameter with the largest; the last line is JSON.
"""

import json
import sys
from argparse import REMAINDER
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch
from side_by_side import Arguments
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from warm_start import TOP

from hybridrl.config import PPOConfig, load_ppo_config
from hybridrl.core.algorithms.objective import Divisors
from hybridrl.core.batch import Batch
from hybridrl.core.cluster import Group, RaySession, spawn
from hybridrl.core.training.fsdp import full_tensor
from hybridrl.core.training.learner import MiniBatch
from hybridrl.core.training.losses import LossConfig
from hybridrl.core.training.planning import Pieces, plan
from hybridrl.core.training.worker import TrainWorker
from hybridrl.required import required
from hybridrl.runs.settings import build_algorithm, build_policy_plan, ppo_worker_config
from hybridrl.runs.setup import start_session
from hybridrl.runtime.environment import worker_environment

RECIPE = TOP / "recipes" / "pretrained"
PROMPT = "Question: What is the capital of {}?\nAnswer:"
# Right and wrong answers of different lengths, and their advantages.
ANSWERS = [
    ("Estonia", " Tallinn\n", 1.5),
    ("Estonia", " The capital of Estonia is Tallinn.\n", -0.5),
    ("Estonia", " Riga\n", -1.0),
    ("Estonia", " Tallinn is the capital, and the largest city\n", 0.25),
    ("Peru", " Lima\n", 1.0),
    ("Peru", " Peru is a country in South America. It is\n", -1.0),
    ("Peru", " Cusco\n", -0.75),
    ("Peru", "\n", 0.5),
]
SECONDS = 600


class GradientRank(TrainWorker):
    """A training rank that writes the gradient of a mini-batch to a file."""

    def gradient(self, batch: Batch, mini_batch: MiniBatch, loss: LossConfig, file: Path) -> None:
        objective = self.objective(loss, [])
        self.actor.model.train()
        self.actor.gradient(batch, mini_batch, objective, float("inf"))
        named = self.actor.model.named_parameters()
        torch.save({name.removeprefix("model."): full_tensor(p.grad) for name, p in named if p.grad is not None}, file)


def batch_of(tokenizer: PreTrainedTokenizerBase) -> Batch:
    prompts = [tokenizer(PROMPT.format(country)).input_ids for country, _, _ in ANSWERS]
    responses = [tokenizer(text, add_special_tokens=False).input_ids for _, text, _ in ANSWERS]
    lengths = torch.tensor([len(ids) for ids in responses])
    group = torch.arange(len(ANSWERS)) // 4
    tokens = int(lengths.sum())
    return Batch(
        prompt_lengths=torch.tensor([len(ids) for ids in prompts]),
        response_lengths=lengths,
        prompt_ids=torch.tensor([*chain(*prompts)], dtype=torch.int32),
        response_ids=torch.tensor([*chain(*responses)], dtype=torch.int32),
        group=group,
        position=group,
        sample=torch.arange(len(ANSWERS)) % 4,
        response_mask=torch.ones(tokens, dtype=torch.bool),
        rollout_log_probs=torch.zeros(tokens),
        advantages=torch.tensor([row[2] for row in ANSWERS]).repeat_interleave(lengths),
    )


def of_a_rank(config: PPOConfig, session: RaySession, batch: Batch, directory: Path) -> dict[str, Tensor]:
    """Return the gradient by parameter name, from a rank that is built as in a run."""
    log, file = str(directory / "rank.log"), directory / "gradient"
    actor = spawn(GradientRank, session, 0, worker_environment(session.device, 1), 0, 1, log, gpus=1)
    group = Group([actor], "train worker", [log])
    place = group.broadcast(TrainWorker.location, timeout=SECONDS)[0]
    worker = ppo_worker_config(config, build_algorithm(config), directory, steps=1)
    group.broadcast(TrainWorker.build, worker, f"{place['address']}:{place['port']}", timeout=SECONDS)
    policy = build_policy_plan(config)
    (micro_batches,) = plan(Pieces.single(batch.lengths.tolist()), 1, policy.updates.budget)
    print(f"{len(batch)} rows in {len(micro_batches)} micro-batches", file=sys.stderr)
    loss = replace(policy.loss, old_from_update=True)  # as in a step of one update
    parts = [(batch, MiniBatch(micro_batches, Divisors.of(batch)), loss, file)]
    group.scatter(GradientRank.gradient, parts, timeout=SECONDS)
    return torch.load(file)


def in_float64(model: Path, batch: Batch) -> dict[str, Tensor]:
    """Return the gradient of the mean of -advantage x log-prob over all response tokens, by transformers."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="sdpa")
    tokens = batch.response_ids.numel()
    # Norms and rotations convert to float32 by `float()`.
    with mock.patch.object(Tensor, "float", Tensor.double):
        for row in range(len(batch)):
            part = batch.select([row])
            ids = torch.cat([part.prompt_ids, part.response_ids]).long()[None]
            logits = policy(ids).logits[0, part.prompt_ids.numel() - 1 : -1]
            log_probs = logits.log_softmax(-1).gather(-1, part.response_ids.long()[:, None])[:, 0]
            (-(required(part.advantages).double() * log_probs).sum() / tokens).backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def compare(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float | str]:
    """Return the relative error of the gradient as a whole, and that of the parameter with the largest."""
    if actual.keys() != expected.keys():
        raise RuntimeError(f"other parameters have a gradient: {sorted(actual.keys() ^ expected.keys())}")
    error = sum(float((actual[name].double() - value).square().sum()) for name, value in expected.items())
    norm = sum(float(value.square().sum()) for value in expected.values())
    each = {name: relative(actual[name], value) for name, value in expected.items()}
    worst = max(each, key=lambda name: each[name])
    return {"relative_error": (error / norm) ** 0.5, "norm": norm**0.5, "worst": each[worst], "parameter": worst}


def main() -> int:
    parser = Arguments(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the directory of a pretrained model")
    parser.add_argument("overrides", nargs=REMAINDER, metavar="key=value", help="of the configuration")
    options = parser.parse_args()
    batch = batch_of(AutoTokenizer.from_pretrained(options.model))
    with TemporaryDirectory() as name:
        values = [f"actor_rollout_ref.model.path={options.model}", f"trainer.default_local_dir={name}"]
        values += [f"reward.custom_reward_function.path={RECIPE}/reward.py", "trainer.n_gpus_per_node=1"]
        config = load_ppo_config([*values, *options.overrides], config_name="train", config_dir=RECIPE)
        session = start_session(config.trainer, config.ray_kwargs.ray_init)
        try:
            actual = of_a_rank(config, session, batch, Path(name))
        finally:
            session.close()
    result = compare(actual, in_float64(options.model, batch))
    print("relative error {relative_error:.2e}, largest {worst:.2e} ({parameter})".format(**result))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
