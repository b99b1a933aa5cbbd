"""Call a function on several ranks at once, each a process in a gloo group; and a gradient over all of them."""

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.core.batch import Batch
from hybridrl.core.training.fsdp import full_tensor
from hybridrl.core.training.learner import BatchLoss, Learner, Prepare
from hybridrl.core.training.planning import MiniBatch

PROCESSES = multiprocessing.get_context("forkserver")
# Imported once, not by every rank: a second for each call.
TESTS = [
    f"tests.core.training.test_{name}" for name in ("loading", "lora", "losses", "loss_scale", "sequence_parallel")
]
PROCESSES.set_forkserver_preload(["transformers.models.qwen2.modeling_qwen2", *TESTS])
SECONDS = 60  # after which a rank counts as hanging


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """What `function(*arguments, **options)` returns on each rank; fails where one of them does."""
    with TemporaryDirectory() as shared:
        calls = [(function, arguments, options, rank, ranks, Path(shared)) for rank in range(ranks)]
        processes = [PROCESSES.Process(target=_rank, args=call) for call in calls]
        for process in processes:
            process.start()
        for process in processes:
            process.join(SECONDS)
            process.kill()
        assert [process.exitcode for process in processes] == [0] * ranks, "its traceback is above, or it hung"
        return [torch.load(Path(shared, str(rank)), weights_only=False) for rank in range(ranks)]


def begin_alike(batch: Batch, *rows: tuple[int, int, int]) -> Batch:
    """Return one group of rows, of which some begin as another: (row, the other one, tokens that they share)."""
    parts = batch.prompt_lengths.tolist(), batch.response_lengths.tolist()
    prompts, responses = (
        [*ids.split(lengths)] for ids, lengths in zip((batch.prompt_ids, batch.response_ids), parts, strict=True)
    )
    whole = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    for row, other, tokens in rows:
        whole[row] = torch.cat([whole[other][:tokens], whole[row][tokens:]])
    pairs = [ids.split([prompt, response]) for ids, prompt, response in zip(whole, *parts, strict=True)]
    prompt_ids, response_ids = (torch.cat([*column]) for column in zip(*pairs, strict=True))
    return replace(batch, prompt_ids=prompt_ids, response_ids=response_ids, group=torch.zeros_like(batch.group))


def whole_gradient(
    learner: Learner, batch: Batch, mini_batch: MiniBatch, loss: BatchLoss, prepare: Prepare | None = None
) -> dict[str, torch.Tensor]:
    """Return one mini-batch's gradient by parameter name, unsharded, without an update."""
    learner.model.train()
    if prepare:
        batch, mini_batch, _ = prepare(batch, mini_batch)
    learner.gradient(batch, mini_batch, loss, inf)
    named = learner.model.named_parameters()
    gradient = {name: full_tensor(p.grad).cpu() for name, p in named if p.grad is not None}
    learner.optimizers.zero_grad()
    return gradient


def _rank(function: Callable[..., Any], arguments: tuple, options: dict, rank: int, ranks: int, shared: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(shared / "store"), ranks), rank=rank, world_size=ranks)
    torch.save(function(*arguments, **options), shared / str(rank))
    dist.destroy_process_group()
