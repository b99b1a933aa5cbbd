"""Prints what an engine on CPU samples under vLLM's synchronous or asynchronous scheduler, as JSON.

    python on_async_scheduler.py MODEL sync|async

vLLM's CPU platform turns asynchronous scheduling off, which is its default on GPUs: here it is turned on again, and an
executor returns each iteration's tokens only when they are asked for, so that two iterations are in flight.
"""

import asyncio
import json
import os
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from hybridrl.config import load_ppo_config
from hybridrl.core.rollout.engine import Completion, Request, Sampling, request_seed
from hybridrl.core.rollout.vllm.settings import vllm_environment

REQUESTS, TOKENS = 10, 20
INTERRUPTED_AFTER = 12  # tokens of all requests


def configured(model: str) -> Any:
    rows = Path(model) / "rows.jsonl"
    rows.write_text("{}\n")
    rollout = "actor_rollout_ref.rollout"
    return load_ppo_config(
        [
            f"data.train_files={rows}",
            f"actor_rollout_ref.model.path={model}",
            "trainer.device=cpu",
            "data.max_prompt_length=32",
            f"data.max_response_length={TOKENS}",
            f"{rollout}.max_num_seqs=4",  # fewer than requests, so that some wait while others run
            f"{rollout}.gpu_memory_utilization=0.1",
        ]
    ).actor_rollout_ref


def use_asynchronous_scheduler() -> type:
    """Keep what the engine's arguments choose; returns an executor for it."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    decide = CpuPlatform.check_and_update_config.__func__

    def keep(cls: type, config: Any) -> None:
        chosen = config.scheduler_config.async_scheduling
        decide(cls, config)
        config.scheduler_config.async_scheduling = chosen

    CpuPlatform.check_and_update_config = classmethod(keep)

    class InFlight(Future):
        """Done once somebody asks, as if the device had needed until then."""

        def __init__(self, value: Any) -> None:
            super().__init__()
            self.value = value

        def result(self, timeout: float | None = None) -> Any:
            return self.value

    class Executor(UniProcExecutor):
        def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
            output = super().sample_tokens(grammar)
            return InFlight(output) if non_block else output

    return Executor


def requests(tokenizer: Any, *stop: str) -> list[Request]:
    prompt = tokenizer("what is 12+34?")["input_ids"]
    sampling = Sampling(TOKENS, (tokenizer.eos_token_id,), stop=stop)
    return [Request(n, 0, [*prompt, 5 + n % 7], request_seed(0, n), sampling) for n in range(REQUESTS)]


def plain(completions: list[Completion]) -> list[list[Any]]:
    return [[one.token_ids.tolist(), one.log_probs.tolist(), one.truncated] for one in completions]


async def sampled(engine: Any, wanted: list[Request]) -> list[Completion]:
    return await asyncio.gather(*map(engine.generate, wanted))


async def interrupted(engine: Any, wanted: list[Request]) -> list[Completion]:
    before = await engine.check()
    tasks = [asyncio.create_task(engine.generate(one)) for one in wanted]
    while await engine.check() < before + INTERRUPTED_AFTER:
        await asyncio.sleep(0.001)
    await engine.interrupt()
    return await asyncio.gather(*tasks)


async def scenario(engine: Any, tokenizer: Any) -> dict[str, Any]:
    await engine.connect()
    wanted = requests(tokenizer)
    core = engine.loop.engine.engine_core.engine_core
    found: dict[str, Any] = {"scheduler": type(core.scheduler).__name__, "queue": core.batch_queue_size}
    found["whole"] = plain(await sampled(engine, wanted))
    found["stopped by texts"] = plain(await sampled(engine, requests(tokenizer, "\n", "=", "1")))
    parts = await interrupted(engine, wanted)
    found["parts"], found["interrupted"] = plain(parts), [one.interrupted for one in parts]
    found["in flight"] = len(core.batch_queue or ())
    await engine.finish_sync(1, 1)  # empties the cache, which fails while a request has blocks
    found["left in flight"] = len(core.batch_queue or ())
    found["again"] = plain(await sampled(engine, wanted))
    found["score"] = await engine.score(wanted[0].prompt_ids)
    found["tokens"] = await engine.check()
    return found


def main() -> None:
    model, kind = sys.argv[1:]
    section = configured(model)
    os.environ |= vllm_environment(section.rollout) | {"VLLM_LOGGING_LEVEL": "ERROR"}
    from transformers import AutoTokenizer

    from hybridrl.core.rollout.vllm.engine import VllmEngine

    arguments = section.rollout.engine_kwargs.vllm
    arguments["load_format"] = "auto"
    if kind == "async":
        arguments |= {"distributed_executor_backend": use_asynchronous_scheduler(), "async_scheduling": True}
    engine = VllmEngine("cpu", section.model, section.rollout, 1)
    print(json.dumps(asyncio.run(scenario(engine, AutoTokenizer.from_pretrained(model)))), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
