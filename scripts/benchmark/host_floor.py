"""The host's share of an update, which no GPU shortens: `OMP_NUM_THREADS=1 python scripts/benchmark/host_floor.py`

The learner, FSDP2 and the optimizer as they are, for a model so narrow that arithmetic takes next to no time: what is
left is Python, torch's dispatch and FSDP's bookkeeping. Processor time of one thread by part, of the fastest round. On
a GPU an update takes at least the sum, unless the GPU itself takes longer.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args
from unittest.mock import patch

import torch
import torch.distributed as dist
from count_update import parts_of, policy_loss_config, unused, update_rows
from models import FSDP
from side_by_side import ROUNDS, Row, arguments, report
from torch import Tensor, nn
from torch.multiprocessing import spawn
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen2Config

from hybridrl.config.schema import OptimizerConfig
from hybridrl.config.values import Aggregation
from hybridrl.core.algorithms.objective import Divisors
from hybridrl.core.training import attention, fsdp, token_outputs
from hybridrl.core.training import learner as learning
from hybridrl.core.training import model as models
from hybridrl.core.training.layout import layout
from hybridrl.core.training.learner import Learner
from hybridrl.core.training.losses import policy_objective
from hybridrl.core.training.model import HOST, LanguageModel, TokenModel
from hybridrl.core.training.optimizer import Optimizers
from hybridrl.core.training.planning import MiniBatch

WIDTH = 4  # tokens of a row
VARIANTS = {
    "sharded": {},
    "gathered once": {"gathered": True},
    "not sharded": {"bare": True},
    "recomputed": {"recompute": 1},
    "every second recomputed": {"recompute": 2},
    "not sharded, recomputed": {"bare": True, "recompute": 1},
}
OPTIMIZER = OptimizerConfig(
    optimizer="AdamW",
    lr=1e-6,
    betas=[0.9, 0.999],
    weight_decay=0.01,
    skip_zero_gradient=False,
    lr_scheduler_type="constant",
    lr_warmup_steps=None,
    lr_warmup_steps_ratio=0.0,
    min_lr_ratio=None,
    num_cycles=0.5,
    stable_ratio=0.0,
    muon_lr=0.02,
    muon_momentum=0.95,
    override_optimizer_config={},
)


class Seconds(Counter[str]):
    """Processor time of this thread, by part. Parts in which another one runs include it."""

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            began = time.thread_time()
            result = call(*arguments, **options)
            self[part] += time.thread_time() - began
            return result

        return run


def copied(module: nn.Module, query: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
    """Stand in for attention with one operation, as its kernel is one."""
    return (query * 1.0).transpose(1, 2), None


def narrow_model(layers: int, variant: Mapping[str, Any], ranks: int) -> LanguageModel:
    """Return a model of this many layers whose products are small."""
    sizes = {"vocab_size": 300, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": layers}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    made = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    if every := variant.get("recompute"):
        made.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False}, every_n_layers=every)
    model = LanguageModel(made).train()
    if variant.get("bare"):
        return model.bfloat16()
    settings = replace(FSDP, dtype="bfloat16", reshard_after_forward=not variant.get("gathered"))
    return fsdp.shard(model, settings, layout("cpu", ranks, ranks))


def timed_updates(rank: int, options: argparse.Namespace, name: str, ranks: int, aggregation: str, file: str) -> None:
    """Write the seconds of the fastest update on this rank to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{file}-store", ranks), rank=rank, world_size=ranks)
    AttentionInterface.register(attention.NAME, copied)
    batch = update_rows(options.rows, WIDTH)
    # As many chunks of logits as a model of 0.5 B has for 16,384 tokens on a GPU.
    chunk = -(-len(batch.response_ids) // options.chunks)
    model = narrow_model(options.layers, VARIANTS[name], ranks)
    optimizers, seconds = Optimizers(model, OPTIMIZER, 100), Seconds()
    learner = Learner(model, FSDP, HOST, padded=False, optimizers=optimizers, dump_prefix=Path(file))
    objective = policy_objective(learner, policy_loss_config(aggregation), unused, [])
    mini_batch = MiniBatch(parts_of(len(batch), options.micro), Divisors.of(batch))
    timed: list[tuple[Any, str, str]] = [
        (models, "token_outputs", "head and early loss"),
        (TokenModel, "hidden_states", "layers"),
        (learning, "clip_gradient", "norm and clipping"),
        (optimizers, "step", "optimizer"),
        (learner, "lay_out", "layout of inputs"),
        (Tensor, "backward", "backward pass"),
    ]
    best = Seconds()
    with patch.object(token_outputs, "FEWEST_TOKENS", chunk), patch.dict(token_outputs.CHUNK_BYTES, {"cpu": 1}):
        for owner, method, part in timed:
            setattr(owner, method, seconds.timed(part, getattr(owner, method)))
        update = seconds.timed("update", learner.update)
        for _ in range(options.rounds):
            seconds.clear()
            update(batch, [mini_batch], objective, 1.0, 1)
            best = seconds.copy() if not best or seconds["update"] < best["update"] else best
    if rank == 0:
        torch.save(dict(best), file)
    dist.destroy_process_group()


def main(options: argparse.Namespace) -> None:
    rows = []
    for name, ranks, aggregation in product(options.variants, options.ranks, options.aggregation):
        with TemporaryDirectory() as directory:
            file = f"{directory}/seconds"
            spawn(timed_updates, args=(options, name, ranks, aggregation, file), nprocs=ranks)
            seconds = sorted(torch.load(file).items(), key=lambda item: -item[1])
        what = f"{name}, ranks: {ranks}, micro-batches: {options.micro}, {aggregation}"
        rows += [Row(f"{what}: {part}", f"{1e3 * value:.1f} ms", "") for part, value in seconds]
    report(rows, options.json)


if __name__ == "__main__":
    tiny = ["sharded", "not sharded"]
    parser = arguments(__doc__, layers=2, rows=8, chunks=2, rounds=1, variants=tiny)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rows", type=int, default=32, help=f"of {WIDTH} tokens")
    parser.add_argument("--micro", type=int, default=1, help="micro-batches of the update")
    parser.add_argument("--chunks", type=int, default=10, help="chunks of all logits")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("--aggregation", nargs="+", choices=get_args(Aggregation), default=["token-mean"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    main(parser.parse_args())
