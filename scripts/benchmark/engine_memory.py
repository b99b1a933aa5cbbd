"""The memory of a rollout server over many steps: `python scripts/benchmark/engine_memory.py [--steps 500]`

One real engine on CPU with an untrained model of the quickstart. In a step all its responses are interrupted and then
continued, as in colocate_async, so that each step prefills another number of tokens. Prints the private memory of the
process, as MiB and as growth per step since the line before. `--products N` is what oneDNN keeps, by default what runs
have; vLLM's own default is 1024.
"""

import argparse
import asyncio
import gc
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from hybridrl.config import load_ppo_config
from hybridrl.rollout import Request, Sampling, request_seed
from hybridrl.rollout.types import continuation
from hybridrl.rollout.vllm.settings import vllm_environment
from hybridrl.runtime.environment import worker_environment

ROOT = Path(__file__).absolute().parents[2]
RESPONSES, TOKENS, LINES = 8, 6, 20
CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"


def private_memory() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Anonymous:"))


async def run(directory: Path, steps: int) -> None:
    from hybridrl.rollout.vllm.engine import VllmEngine  # reads the environment that this process was given

    section = load_ppo_config(overrides(directory)).actor_rollout_ref
    engine = VllmEngine("cpu", section.model, section.rollout, 1)
    await engine.connect()
    requests: list[Request] = []
    before = private_memory()
    for step in range(1, steps + 1):
        while len(requests) < RESPONSES:
            seed = request_seed(7, step, len(requests))
            prompt = [3 + (seed + n) % 256 for n in range(16 + seed % 64)]
            requests.append(Request(seed, 0, prompt, seed, Sampling(80, (1,))))
        sampled = await engine.check()
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        while await engine.check() < sampled + RESPONSES * TOKENS and not all(task.done() for task in tasks):
            await asyncio.sleep(0.001)
        await engine.interrupt()
        parts = zip(requests, await asyncio.gather(*tasks), strict=True)
        requests = [continuation(request, part) for request, part in parts if part.interrupted]
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
        f"reward.custom_reward_function.path={ROOT}/tests/integration/length_reward.py",
        "data.max_prompt_length=80",
        "data.max_response_length=80",
        "actor_rollout_ref.rollout.max_num_seqs=8",
        "trainer.n_gpus_per_node=1",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--products")
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)  # of the model, in the measured process
    options = parser.parse_args()
    if options.directory:
        asyncio.run(run(options.directory, options.steps))
        os._exit(0)
    with TemporaryDirectory() as directory:
        make = [sys.executable, f"{ROOT}/recipes/quickstart/make_data.py", "--out", directory]
        subprocess.run(make, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        rollout = load_ppo_config(overrides(Path(directory))).actor_rollout_ref.rollout
        environment = worker_environment("cpu", slots=1) | vllm_environment(rollout)
        environment |= {CAPACITY: options.products} if options.products else {}
        command = [sys.executable, __file__, "--steps", str(options.steps), "--directory", directory]
        subprocess.run(command, check=True, env=os.environ | environment)


if __name__ == "__main__":
    main()
