"""Requests that would end a real engine, between requests that it continues to sample."""

import asyncio
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest

from hybridrl.config import load_ppo_config
from hybridrl.config.schema import ModelConfig, RolloutConfig
from hybridrl.core.rollout import Request, Sampling
from hybridrl.core.rollout.engine import RejectedRequest
from hybridrl.core.rollout.vllm.engine import VllmEngine
from hybridrl.core.rollout.vllm.settings import vllm_environment
from hybridrl.runtime.environment import worker_environment

SOUND = Request(0, 0, [1, 20, 30], 7, Sampling(16, (), ignore_eos=True))
MALFORMED = [
    *(replace(SOUND, prompt_ids=ids) for ids in ([], [1, 320], [2**31], [2**70], [-1], [1] * 64, ["a"], [1.5])),
    *(replace(SOUND, seed=seed) for seed in (2**70, 2**63, -(2**70), "a")),
    *(replace(SOUND, sampling=replace(SOUND.sampling, stop=stop)) for stop in (("",), ("a", ""), (1,), ("a" * 10**6,))),
    *(replace(SOUND, sampling=replace(SOUND.sampling, max_tokens=most)) for most in (0, -1, 2**70, 1.5, None)),
    *(replace(SOUND, sampling=replace(SOUND.sampling, top_k=top)) for top in (-5, 1.5)),
    *(replace(SOUND, sampling=replace(SOUND.sampling, temperature=one)) for one in (1e9, -1.0, float("nan"))),
]
# What an engine takes although it is odd.
ODD = [
    replace(SOUND, seed=2**63 - 1),
    replace(SOUND, sampling=replace(SOUND.sampling, top_k=2**40, temperature=1e-300)),
    replace(SOUND, sampling=replace(SOUND.sampling, stop=("\ud800", "\0"), max_tokens=2**62)),
    replace(SOUND, prompt_ids=[319] * 63),
]


def sample(model: ModelConfig, rollout: RolloutConfig) -> tuple[list[str], list[int], list[int]]:
    async def run() -> tuple[list[str], list[int], list[int]]:
        engine = VllmEngine("cpu", model, rollout, 1)
        await engine.connect()
        running = [asyncio.create_task(engine.generate(SOUND)) for _ in range(2)]
        faults = await asyncio.gather(*map(engine.generate, MALFORMED), return_exceptions=True)
        odd = await asyncio.gather(*map(engine.generate, ODD))
        running.append(asyncio.create_task(engine.generate(SOUND)))
        lengths = [len(one.token_ids) for one in await asyncio.gather(*running)]
        await engine.check()
        return [type(fault).__name__ for fault in faults], [len(one.token_ids) for one in odd], lengths

    return asyncio.run(asyncio.wait_for(run(), 240))


@pytest.mark.slow
def test_a_malformed_request_is_rejected_and_the_engine_continues(overrides, tmp_path, monkeypatch):
    lengths = {"data.max_prompt_length": 40, "data.max_response_length": 24}
    config = load_ppo_config(overrides(tmp_path, lengths | {"actor_rollout_ref.rollout.max_model_len": 64}))
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    for name, value in (worker_environment("cpu", slots=1) | vllm_environment(rollout)).items():
        monkeypatch.setenv(name, value)
    with ProcessPoolExecutor(1, get_context("spawn")) as process:  # an engine lives as long as its process
        faults, odd, lengths = process.submit(sample, model, rollout).result()
    assert faults == [RejectedRequest.__name__] * len(MALFORMED)
    assert lengths == [16] * 3
    assert odd[0] == odd[1] == 16 and odd[3] == 1 and 0 < odd[2] < 64
