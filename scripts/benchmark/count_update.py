"""Count what an update asks of a GPU, without one: `python scripts/benchmark/count_update.py`

The update's own code runs on the meta device (launches.py): kernels are counted with the bytes that they read and write
and the operations of matrix products; waits of the host and copies from it are listed with their lines. FSDP and the
optimizer are left out: host_floor.py has them.
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import get_args
from unittest.mock import patch

import torch
import torch.distributed as dist
from gpu_work import Load
from launches import DEVICE, Launches, counted, within
from models import FSDP, SHAPES
from side_by_side import Row, arguments, report
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, Qwen2Config

from hybridrl.config.values import Aggregation
from hybridrl.core.algorithms.algorithm import loss_terms
from hybridrl.core.algorithms.objective import Divisors
from hybridrl.core.batch import Batch
from hybridrl.core.training import attention
from hybridrl.core.training import learner as learning
from hybridrl.core.training import model as models
from hybridrl.core.training.learner import BatchLoss, Learner, Prepare
from hybridrl.core.training.losses import LossConfig, policy_objective
from hybridrl.core.training.model import LanguageModel, TokenModel, ValueModel
from hybridrl.core.training.optimizer import LossScale, Optimizers
from hybridrl.core.training.planning import MiniBatch

BANDWIDTH = 2.8e12  # bytes per second that an H100 reads and writes in practice
CLIPPING = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
LAYOUT, LAYERS, HEAD, LOSS, BACKWARD = "layout", "layers", "head, with the early loss", "loss", "backward pass"
CLIP, END = "norm and clipping", "end of the update"


class NoOptimizers(Optimizers):
    """Does nothing in place of a step."""

    def __init__(self) -> None:
        self.loss_scale, self.skip_zero_gradient, self.optimizers = LossScale(torch.bfloat16), False, []

    @property
    def lr(self) -> float:
        return 0.0

    def step(self) -> None: ...

    def skip(self) -> None: ...


def language_model(shape: str, *, recompute: bool = False) -> LanguageModel:
    """Return a model in bfloat16 on the meta device."""
    config = Qwen2Config(**{"tie_word_embeddings": True} | SHAPES[shape])
    with DEVICE:
        made = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.bfloat16)
    if recompute:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return LanguageModel(made)


def value_model(shape: str) -> ValueModel:
    """Return a critic in bfloat16 on the meta device."""
    config = Qwen2Config(**SHAPES[shape], num_labels=1)
    with DEVICE:
        made = AutoModelForTokenClassification.from_config(
            config, attn_implementation=attention.NAME, dtype=torch.bfloat16
        )
    return ValueModel(made)


def learner_of(model: TokenModel) -> Learner:
    """Return a learner of a model that is not sharded, without an optimizer."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return Learner(model, FSDP, DEVICE, padded=False, optimizers=NoOptimizers(), dump_prefix=Path("none"))


def update_rows(rows: int, width: int) -> Batch:
    """Return rows as a rank gets them for an update: without rewards, with advantages."""
    batch = Load(rows, width, 0, 0).batch(1)
    return replace(batch, advantages=torch.zeros(len(batch.response_ids)), rewards=None, truncated=None)


def policy_loss_config(aggregation: str) -> LossConfig:
    """Return PPO's loss, with the log-probs of the update itself as the old ones."""
    terms = loss_terms("vanilla")
    return LossConfig(terms, aggregation, 1.0, 1.0, 1.0, CLIPPING, old_from_update=True, log_entropy=True)


def parts_of(rows: int, parts: int) -> list[list[int]]:
    """Return rows in this many micro-batches."""
    return [part.tolist() for part in torch.arange(rows).chunk(parts)]


def count(
    learner: Learner,
    loss: BatchLoss,
    batch: Batch,
    micro_batches: Sequence[Sequence[int]],
    masks: Sequence[str] = (),
    prepare: Prepare | None = None,
) -> Launches:
    """Run one update on the meta device and return what it launches; `masks` are those of the loss. Teachers take turns
    from micro-batch to micro-batch."""
    teachers = tuple(islice(cycle(learner.teachers), len(micro_batches)))
    mini_batch = MiniBatch([*map(list, micro_batches)], Divisors.of(batch, masks), teachers)
    with ExitStack() as stack:
        launches = stack.enter_context(counted())
        launches.part = LAYOUT
        outputs = within(launches, HEAD, models.token_outputs, LOSS)
        hidden = within(launches, LAYERS, TokenModel.hidden_states, LOSS)
        clip = within(launches, CLIP, learning.clip_gradient, END)
        stack.enter_context(patch.object(models, "token_outputs", outputs))
        stack.enter_context(patch.object(TokenModel, "hidden_states", hidden))
        stack.enter_context(patch.object(learning, "clip_gradient", clip))
        objective = within(launches, LAYERS, loss, BACKWARD)
        learner.update(batch, [mini_batch], objective, 1.0, step=1, prepare=prepare)
    return launches


def rows_of(launches: Launches, what: str, layers: int) -> list[Row]:
    """Return the kernels of each part of an update as rows, and how often the host waits and copies."""
    rows = []
    for part, kernels in launches.kernels.items():
        size, operations = launches.bytes[part], launches.operations[part]
        cost = f"{size / 1e9:.1f} GB, {1e3 * size / BANDWIDTH:.1f} ms at 2.8 TB/s; {operations / 1e12:.1f} TFLOP"
        rows.append(Row(f"{what}: launches, {part}", f"{kernels:,}, {kernels / layers:.1f} per layer", cost))
    sums = {"launches": launches.kernels, "waits of the host": launches.waits, "copies from the host": launches.copies}
    return rows + [Row(f"{what}: {name}", f"{sum(counts.values()):,}", "") for name, counts in sums.items()]


def print_lines(title: str, lines: dict[tuple[str, str], int]) -> None:
    print(title)
    for (part, line), number in sorted(lines.items(), key=lambda item: -item[1]):
        print(f"{number:5d}  {part:26s} {line[:110]}")


def main(options: argparse.Namespace) -> None:
    learner = learner_of(language_model(options.shape, recompute=options.recompute))
    rows, batch = [], update_rows(options.tokens // options.width, options.width)
    for aggregation in options.aggregation:
        for micro in options.micro:
            loss = policy_objective(learner, policy_loss_config(aggregation), unused, [])
            what = f"{options.shape}, {aggregation}, micro-batches: {micro}"
            launches = count(learner, loss, batch, parts_of(len(batch), micro))
            print_lines(f"\n{what}\nwaits of the host:", launches.waits)
            print_lines("copies from the host:", launches.copies)
            rows += rows_of(launches, what, SHAPES[options.shape]["num_hidden_layers"])
    report(rows, options.json)


def unused(*_: object) -> None:
    raise RuntimeError("no term of this loss compares the policy with another model")


if __name__ == "__main__":
    parser = arguments(__doc__, shape="tiny", tokens=256, width=64)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--tokens", type=int, default=16384, help="of all rows")
    parser.add_argument("--width", type=int, default=512, help="tokens of a row")
    parser.add_argument("--micro", type=int, nargs="+", default=[1, 4], help="numbers of micro-batches")
    losses = ["token-mean", "seq-mean-token-mean"]
    parser.add_argument("--aggregation", nargs="+", choices=get_args(Aggregation), default=losses)
    parser.add_argument("--recompute", action="store_true", help="with gradient checkpointing")
    main(parser.parse_args())
