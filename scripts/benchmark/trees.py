"""The gain of rows that compute their common beginnings once: `python scripts/benchmark/trees.py [--only NAME]`

One rank computes the gradient of a mini-batch, and the old log-probs of its rows, in turn with every row alone and with
what rows share computed once, each in the micro-batches that the driver plans for it. Cases: 25m and quickstart have
the prompts and lengths of step.py; `prompt` has prompts of 1,024 tokens, with 8 responses of 64 to 128; `turns` has
episodes of 8 turns, each a row, as a part of what it wrote leaves the context. The value is the time of rows alone
over that of trees. In `different` every row has a prompt of its own, so that nothing is shared: the other side is the
same rows with no step that looks for common beginnings. Then attention and its gradient alone, over one prompt with
its responses.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import torch
import torch.distributed as dist
from count_update import policy_loss_config
from host_floor import OPTIMIZER
from imposed import RESPONSES
from models import FSDP, SHAPES
from side_by_side import ROUNDS, Row, Seconds, arguments, formatted, in_turn, report
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl.core.algorithms.objective import Divisors
from hybridrl.core.batch import Batch, pack
from hybridrl.core.training import attention, fsdp, learner
from hybridrl.core.training.attention import attend
from hybridrl.core.training.layout import layout
from hybridrl.core.training.learner import Learner
from hybridrl.core.training.losses import policy_objective
from hybridrl.core.training.model import HOST, LanguageModel
from hybridrl.core.training.optimizer import Optimizers
from hybridrl.core.training.packing import ModelInputs, each_token_once, pack_rows
from hybridrl.core.training.planning import Forest, MicroBatchBudget, MiniBatch, Pieces, plan, plan_trees

QUICKSTART = {
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
Text = tuple[list[int], list[int]]  # prompt and response
# Case -> targets of the gradient and of the log-probs.
TARGETS = {
    "25m": ("at least 1.02 (aim 1.08)", "at least 0.97"),
    "prompt": ("at least 3.5", "at least 3.15"),
    "turns": ("at least 2.15", "at least 1.94"),
    "quickstart": ("at least 1.22", "at least 1.1"),
    "different": ("at least 0.99", "at least 0.99"),
}
# Prompt, lengths of its responses, target.
ATTENTION = {
    "24 and 60": (24, [60] * 8, "at least 0.9"),
    "24 and the tail of 25m": (24, sorted(RESPONSES["25m"].lengths)[-8:], "at least 1.0"),
    "1,024 and 64 to 128": (1024, [*range(64, 129, 9)], "at least 2.9"),
    "256 and 128 to 384": (256, [*range(128, 385, 36)], "at least 1.45"),
    "1,024 and 512 to 1,024": (1024, [*range(512, 1025, 73)], "at least 1.0"),
}


def responses_to(prompts: int, prompt: int, lengths: Sequence[int], draw: random.Random, ids: int) -> list[list[Text]]:
    """Return groups of responses of these lengths, to prompts of this length."""

    def tokens(count: int) -> list[int]:
        return [draw.randrange(20, ids) for _ in range(count)]

    samples, groups = len(lengths) // prompts, []
    for number in range(prompts):
        begin = tokens(prompt)
        groups.append([(begin, tokens(length)) for length in lengths[number * samples :][:samples]])
    return groups


def turns(episodes: int, draw: random.Random, ids: int) -> list[list[Text]]:
    """Return two prompts' episodes of 8 turns as rows: each reads 30 to 60 tokens and writes 90 to 180, of which the
    first 30 to 60 stay."""

    def tokens(least: int, most: int) -> list[int]:
        return [draw.randrange(20, ids) for _ in range(draw.randint(least, most))]

    groups: list[list[Text]] = []
    for _ in range(2):
        begin, rows = tokens(200, 200), []
        for _ in range(episodes):
            context = begin
            for _ in range(8):
                context = context + tokens(30, 60)
                rows.append((context, written := tokens(90, 180)))
                context = context + written[: draw.randint(30, 60)]
        groups.append(rows)
    return groups


def batch_of(groups: list[list[Text]]) -> Batch:
    rows = [row for group in groups for row in group]
    numbers = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(group) for group in groups]))
    prompt_ids, prompt_lengths = pack([prompt for prompt, _ in rows], torch.int32)
    response_ids, response_lengths = pack([response for _, response in rows], torch.int32)
    tokens, generator = len(response_ids), torch.Generator().manual_seed(0)
    return Batch(
        prompt_lengths, response_lengths, prompt_ids, response_ids, numbers, numbers, numbers,
        response_mask=torch.ones(tokens, dtype=torch.bool), advantages=torch.randn(tokens, generator=generator),
    )  # fmt: skip


def cases(tiny: bool) -> dict[str, tuple[dict[str, int], Batch]]:
    """Return the shape of the model and the rows of each case."""
    draw, shape = random.Random(0), SHAPES["tiny" if tiny else "25m"]
    ids, part = shape["vocab_size"], 8 if tiny else 1
    quickstart = RESPONSES["quickstart"].lengths[: 64 // part]
    return {
        "25m": (shape, batch_of(responses_to(16 // part, 24, RESPONSES["25m"].lengths[: 128 // part], draw, ids))),
        "prompt": (shape, batch_of(responses_to(1, 1024 // part, [*range(64, 129, 9)], draw, ids))),
        "turns": (shape, batch_of(turns(1, draw, ids))),
        "quickstart": (QUICKSTART, batch_of(responses_to(8 // part, 24, quickstart, draw, QUICKSTART["vocab_size"]))),
        "different": (shape, batch_of(responses_to(32 // part, 24, RESPONSES["25m"].lengths[: 32 // part], draw, ids))),
    }


class Sides:
    """The sides of a case, on one rank: `trees`, rows `alone`, and rows `unsorted`, as they come."""

    def __init__(self, shape: dict[str, int], batch: Batch) -> None:
        config = Qwen2Config(**{"tie_word_embeddings": True} | shape)
        made = LanguageModel(AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME))
        model = fsdp.shard(made, FSDP, layout("cpu", 1, 1)).train()
        optimizers = Optimizers(model, OPTIMIZER, 100)
        self.learner = Learner(model, FSDP, HOST, padded=False, optimizers=optimizers, dump_prefix=Path())
        self.batch, self.loss = batch, policy_loss_config("token-mean")
        pieces, budget = Pieces.single(batch.lengths.numpy()), MicroBatchBudget(16384)
        self.planned = {"alone": plan(pieces, 1, budget)[0]}
        self.planned["trees"] = plan_trees(pieces, Forest.of([batch]), 1, budget)[0]
        self.planned["unsorted"] = self.planned["alone"]

    def take(self, side: str) -> None:
        self.learner.shares = side == "trees"
        vars(learner)["each_token_once"] = as_they_come if side == "unsorted" else each_token_once

    def gradient(self, side: str) -> float:
        """Compute the gradient of a side; return its norm."""
        self.take(side)
        objective, totals = policy_objective(self.learner, self.loss, None, []), Divisors.of(self.batch)
        *_, norm = self.learner.gradient(self.batch, MiniBatch(self.planned[side], totals), objective, 1.0)
        self.learner.optimizers.zero_grad()
        return norm

    @torch.no_grad()
    def log_probs(self, side: str) -> None:
        self.take(side)
        for rows in self.planned[side]:
            self.learner.model(self.learner.inputs(self.batch.select(rows)), 1.0, entropies=True)

    def computed(self, side: str) -> int:
        """Return the tokens that a side computes."""
        self.take(side)
        return sum(self.learner.lay_out(self.batch.select(rows)).computed for rows in self.planned[side])


def as_they_come(inputs: ModelInputs, *_: object) -> ModelInputs:
    """Stand in for `each_token_once`: every token of every row."""
    return inputs


def compared(
    what: str, work: Callable[[str], object], rounds: int, target: str, more: str = "", other: str = "alone"
) -> Row:
    seconds = in_turn({side: partial(work, side) for side in ("trees", other)}, rounds)
    ours, theirs = seconds["trees"], seconds[other]
    return Row(what, formatted(ours), f"rows {other} {formatted(theirs)}{more}", ratio(theirs, ours), target)


def ratio(theirs: Seconds, ours: Seconds) -> float:
    """Return the median over the rounds, of which each has both sides."""
    return float(np.median(np.array(theirs.cpu) / np.array(ours.cpu)))


def attention_row(name: str, rounds: int) -> Row:
    """Compare attention and its gradient, with 6 heads of 64, of which 2 have keys."""
    prompt, lengths, target = ATTENTION[name]
    (texts,) = responses_to(1, prompt, lengths, random.Random(0), 1000)
    batch = batch_of([texts])
    inputs = {"alone": each_token_once(pack_rows(batch, False), batch, 1, shares=False)}
    inputs["trees"] = each_token_once(pack_rows(batch, False), batch, 1, shares=True)
    tensors = {
        side: [torch.randn(1, of.computed, heads, 64).transpose(1, 2).requires_grad_() for heads in (6, 2, 2)]
        for side, of in inputs.items()
    }
    module = nn.Module()

    def work(side: str) -> None:
        query, key, value = tensors[side]
        output, _ = attend(module, query, key, value, None, packed=inputs[side].packed)
        output.backward(torch.ones_like(output))

    return compared(f"attention and its gradient, {name}", work, 20 * rounds, target)


def main(options: argparse.Namespace) -> None:
    with NamedTemporaryFile() as file:
        dist.init_process_group("gloo", store=dist.FileStore(file.name, 1), rank=0, world_size=1)
    rows: list[Row] = []
    for name, (shape, batch) in cases(options.tiny).items():
        if options.only not in ("", name):
            continue
        sides, (of_gradient, of_log_probs) = Sides(shape, batch), TARGETS[name]
        other = "unsorted" if name == "different" else "alone"
        norms = {side: sides.gradient(side) for side in ("trees", other)}
        if abs(norms["trees"] / norms[other] - 1) > 1e-3:
            raise SystemExit(f"{name}: the gradients differ: {norms}")
        tokens = {side: sides.computed(side) for side in ("trees", other)}
        more = f"; {tokens['trees']:,} of {int(batch.lengths.sum()):,} tokens"
        rows.append(compared(f"gradient, {name}", sides.gradient, options.rounds, of_gradient, more, other))
        rows.append(compared(f"old log-probs, {name}", sides.log_probs, options.rounds, of_log_probs, "", other))
    if options.only in ("", "attention"):
        rows += [attention_row(name, options.rounds) for name in ATTENTION]
    report(rows, options.json)


if __name__ == "__main__":
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", choices=["", *TARGETS, "attention"])
    main(parser.parse_args())
