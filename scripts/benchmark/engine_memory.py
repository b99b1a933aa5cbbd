"""The memory of a rollout server over many steps: `python scripts/benchmark/engine_memory.py [--synchronous]`

One real engine on CPU with an untrained model of the quickstart. In a step all its responses are interrupted and then
continued, as in colocate_async, so that each step prefills another number of tokens; with `--synchronous` a step loads
all weights and samples whole responses to new prompts. Prints the private memory of the process, as MiB and as growth
per step since the line before. `--products N` is what oneDNN keeps, by default what runs
have; vLLM's own default is 1024.
"""

import asyncio
import gc
import os
import subprocess
import sys
from argparse import SUPPRESS
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from side_by_side import Arguments
from warm_start import TOP, make_data

from hybridrl.config import load_ppo_config
from hybridrl.core.rollout import Request, Sampling, request_seed
from hybridrl.core.rollout.engine import continuation
from hybridrl.core.rollout.vllm.settings import vllm_environment
from hybridrl.core.weights.buckets import Bucket, SharedBuffer, buffer_bytes, digest, plan_buckets
from hybridrl.runtime.environment import worker_environment

RESPONSES, TOKENS, LINES = 8, 6, 20
CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"


def private_memory() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Anonymous:"))


async def interrupted_step(engine: Any, step: int, requests: list[Request]) -> list[Request]:
    """Continue the responses, with new ones for those that ended. Returns those that are interrupted."""
    requests = requests + new_requests(step, RESPONSES)[len(requests) :]
    sampled = await engine.check()
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    while await engine.check() < sampled + RESPONSES * TOKENS and not all(task.done() for task in tasks):
        await asyncio.sleep(0.001)
    await engine.interrupt()
    parts = zip(requests, await asyncio.gather(*tasks), strict=True)
    return [continuation(request, part) for request, part in parts if part.interrupted]


async def synchronous_step(engine: Any, step: int, weights: SharedBuffer, buckets: list[Bucket]) -> None:
    """Load all weights and sample four times as many whole responses as the engine runs at a time."""
    await engine.sleep()
    await engine.wake("weights")
    await engine.begin_weights()
    for bucket in buckets:
        await engine.load_bucket(bucket, [weights.handle], [digest(bucket.view(weights.tensor))], False)
    await engine.finish_weights()
    await engine.wake("kv_cache")
    await engine.finish_sync(step, step)
    await engine.score(new_requests(0, 1)[0].prompt_ids)
    await asyncio.gather(*map(engine.generate, new_requests(step, 4 * RESPONSES)))


def new_requests(step: int, count: int) -> list[Request]:
    seeds = [request_seed(7, step, number) for number in range(count)]
    prompts = [[3 + (seed + n) % 256 for n in range(16 + seed % 64)] for seed in seeds]
    return [Request(seed, 0, prompt, seed, Sampling(80, (1,))) for seed, prompt in zip(seeds, prompts, strict=True)]


def shared_weights(model: Path) -> tuple[SharedBuffer, list[Bucket]]:
    """Return a model's weights as its trainer would send them."""
    tensors = load_file(model / "model.safetensors")
    buckets = plan_buckets([(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()], 1 << 30)
    weights = SharedBuffer(buffer_bytes(buckets), torch.device("cpu"))
    for bucket in buckets:
        for tensor in bucket.tensors:
            tensor.view(bucket.view(weights.tensor)).copy_(tensors[tensor.name])
    return weights, buckets


async def run(directory: Path, steps: int, kinds: list[str]) -> None:
    from hybridrl.core.rollout.vllm.engine import VllmEngine  # reads the environment that this process was given

    section = load_ppo_config(overrides(directory)).actor_rollout_ref
    engine = VllmEngine("cpu", section.model, section.rollout, 1)
    await engine.connect()
    requests: list[Request] = []
    weights = shared_weights(directory / "model")
    before = private_memory()
    for step in range(1, steps + 1):
        if kinds[step % len(kinds)] == "synchronous":
            await synchronous_step(engine, step, *weights)
        else:
            requests = await interrupted_step(engine, step, requests)
        await engine.take_stats()
        if step % (steps // LINES or 1) == 0:
            gc.collect()
            now = private_memory()
            print(f"step {step:5}  {now:8.1f} MiB  {(now - before) / (steps // LINES or 1):6.2f} per step", flush=True)
            before = now


def overrides(directory: Path) -> list[str]:
    return [
        f"data.train_files={directory}/train.jsonl",
        f"actor_rollout_ref.model.path={directory}/model",
        f"reward.custom_reward_function.path={TOP}/tests/integration/length_reward.py",
        "data.max_prompt_length=80",
        "data.max_response_length=80",
        "actor_rollout_ref.rollout.max_num_seqs=8",
        "trainer.n_gpus_per_node=1",
    ]


def main() -> None:
    parser = Arguments(__doc__, steps=2, kinds=["interrupted", "synchronous"])
    parser.add_argument("--steps", type=int, default=500)
    kinds = {"dest": "kinds", "const": ["synchronous"], "default": ["interrupted"]}
    parser.add_argument(
        "--synchronous", action="store_const", help="steps of the other kind (--tiny: of both)", **kinds
    )
    parser.add_argument("--products")
    parser.add_argument("--directory", type=Path, help=SUPPRESS)  # of the model, in the measured process
    options = parser.parse_args()
    if options.directory:
        asyncio.run(run(options.directory, options.steps, options.kinds))
        os._exit(0)
    with TemporaryDirectory() as directory:
        data = Path(directory, "data")
        if not make_data(0, data.parent):
            sys.exit("the model could not be made")
        rollout = load_ppo_config(overrides(data)).actor_rollout_ref.rollout
        environment = worker_environment("cpu", slots=1) | vllm_environment(rollout)
        environment |= {CAPACITY: options.products} if options.products else {}
        command = [sys.executable, __file__, *sys.argv[1:], "--directory", str(data)]
        subprocess.run(command, check=True, env=os.environ | environment)


if __name__ == "__main__":
    main()
