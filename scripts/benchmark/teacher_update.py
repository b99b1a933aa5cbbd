"""The cost of a teacher in an update: `python scripts/benchmark/teacher_update.py`

One rank computes the gradient of the same rows in turn: with the policy loss alone; with the estimated KL to a
reference of the policy's size, whose log-probs a pass before the update gives; with the exact KL to it; with the
reverse KL to a teacher of that size, and to two of which each teaches half of the rows. The value is the processor time
over that of the side it is compared with.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile

import torch
import torch.distributed as dist
from count_update import parts_of, policy_loss_config, update_rows
from host_floor import OPTIMIZER
from models import FSDP, SHAPES
from side_by_side import ROUNDS, Row, arguments, formatted, in_turn, report
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl.config.catalog import EXACT_TEACHER, FULL_KL, SAMPLED_KL, LossTerm
from hybridrl.core.algorithms.objective import Divisors
from hybridrl.core.batch import Batch
from hybridrl.core.training import attention, fsdp
from hybridrl.core.training.heads import Head, ReferenceOutputs
from hybridrl.core.training.layout import layout
from hybridrl.core.training.learner import Learner, ModelShard
from hybridrl.core.training.losses import policy_objective
from hybridrl.core.training.model import HOST, LanguageModel
from hybridrl.core.training.optimizer import Optimizers
from hybridrl.core.training.packing import ModelInputs
from hybridrl.core.training.planning import MiniBatch

TEACHERS = ("teacher.one", "teacher.two")
EXACT = replace(EXACT_TEACHER, parameters={"most": None})
# Side -> further terms of the loss, and teachers.
SIDES: dict[str, tuple[Sequence[LossTerm], Sequence[str]]] = {
    "policy loss": ((), ()),
    "estimated KL": ((replace(SAMPLED_KL, parameters={"form": "low_var_kl"}),), ()),
    "exact KL": ((FULL_KL,), ()),
    "teacher": ((EXACT,), TEACHERS[:1]),
    "two teachers": ((EXACT,), TEACHERS),
}
# Side -> the side that it is compared with, and the target.
TARGETS = {
    "teacher": [("exact KL", "at most 1.05"), ("estimated KL", "at most 1.15"), ("policy loss", "")],
    "two teachers": [("teacher", "at most 1.1")],
}


def model_of(shape: str) -> LanguageModel:
    """Return a model with random weights on the only rank."""
    config = Qwen2Config(**{"tie_word_embeddings": True} | SHAPES[shape])
    model = LanguageModel(AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME))
    return fsdp.shard(model, FSDP, layout("cpu", 1, 1))


@torch.no_grad()
def hidden_of(models: dict[str, LanguageModel], name: str, inputs: ModelInputs) -> ReferenceOutputs:
    model = models[name]
    weight, bias, rule = model.head
    return ReferenceOutputs(model.hidden_states(inputs), Head(weight.clone(), bias, rule))


def gradient(learner: Learner, models: dict[str, LanguageModel], name: str, batch: Batch, parts: int) -> None:
    """Compute the gradient of one side."""
    terms, teachers = SIDES[name]
    base = policy_loss_config("token-mean")
    loss = replace(base, terms=(*base.terms, *terms), teachers=tuple(teachers))
    shards = {key: ModelShard(model, FSDP, HOST, padded=False) for key, model in models.items()}
    learner.against = {key: shards[key] for key in (loss.against,) if key}
    learner.teachers = {key: shards[key] for key in teachers}
    micro_batches = parts_of(len(batch), parts)
    if name == "estimated KL":
        with torch.no_grad():
            inputs = (shards["reference"].inputs(batch.select(rows)) for rows in micro_batches)
            log_probs = torch.cat([models["reference"](each, 1.0).log_probs for each in inputs])
        batch = replace(batch, reference_log_probs=log_probs)
    of_parts = tuple(teachers[number % len(teachers)] for number in range(parts)) if teachers else ()
    objective = policy_objective(learner, loss, partial(hidden_of, models), [])
    learner.gradient(batch, MiniBatch(micro_batches, Divisors.of(batch), of_parts), objective, 1.0)
    learner.optimizers.zero_grad()


def main(options: argparse.Namespace) -> None:
    with NamedTemporaryFile() as file:
        dist.init_process_group("gloo", store=dist.FileStore(file.name, 1), rank=0, world_size=1)
    policy = model_of(options.shape).train()
    models = {name: model_of(options.shape).eval().requires_grad_(False) for name in ("reference", *TEACHERS)}
    optimizers = Optimizers(policy, OPTIMIZER, 100)
    learner = Learner(policy, FSDP, HOST, padded=False, optimizers=optimizers, dump_prefix=Path())
    batch = update_rows(options.rows, options.width)
    sides: dict[str, Callable[[], None]] = {
        name: partial(gradient, learner, models, name, batch, options.micro) for name in SIDES
    }
    seconds, rows = in_turn(sides, options.rounds), []
    for name, targets in TARGETS.items():
        for other, target in targets:
            pairs = zip(seconds[name].cpu, seconds[other].cpu, strict=True)
            ratio = median(ours / theirs for ours, theirs in pairs)
            what = f"{options.shape}, {options.rows} x {options.width} tokens: {name} and {other}"
            rows.append(Row(what, formatted(seconds[name]), formatted(seconds[other]), ratio, target))
    report(rows, options.json)


if __name__ == "__main__":
    parser = arguments(__doc__, shape="tiny", rows=4, width=8, micro=2, rounds=1)
    parser.add_argument("--shape", choices=SHAPES, default="25m")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--width", type=int, default=128, help="tokens of a response")
    parser.add_argument("--micro", type=int, default=2, help="micro-batches of the update")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    main(parser.parse_args())
