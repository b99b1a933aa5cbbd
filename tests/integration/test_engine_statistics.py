"""vLLM's statistics as they reach the metrics, from one real engine without trainers."""

import asyncio
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest

from hybridrl.config import load_ppo_config
from hybridrl.config.schema import ModelConfig, RolloutConfig
from hybridrl.core.rollout import Request, Sampling, request_seed
from hybridrl.core.rollout.cache import cache_bytes_per_token
from hybridrl.core.rollout.engine import engine_metrics
from hybridrl.core.rollout.vllm.engine import VllmEngine
from hybridrl.core.rollout.vllm.settings import CPU_BLOCK, vllm_environment
from hybridrl.runtime.environment import worker_environment

SHARED = [1, *range(20, 20 + CPU_BLOCK)]  # a full block of the cache; a request begins with two and ends with three
REQUESTS = [
    Request(p, s, [*SHARED, 3 + p], request_seed(7, p, s), Sampling(200, (), ignore_eos=True))
    for p in range(2)
    for s in range(4)
]


def sample(model: ModelConfig, rollout: RolloutConfig) -> tuple[list[list[int]], dict[str, float]]:
    async def run() -> tuple[list[list[int]], dict[str, float]]:
        engine = VllmEngine("cpu", model, rollout, 1)
        await engine.connect()
        responses = await asyncio.gather(*map(engine.generate, REQUESTS))
        return [response.token_ids.tolist() for response in responses], engine_metrics([await engine.take_stats()], 4)

    return asyncio.run(run())


@pytest.fixture
def sampled(overrides, tmp_path, monkeypatch):
    """The tokens of all requests, and the metrics, from an engine whose cache holds `rows` responses."""

    def run(rows: int, **more: object) -> tuple[list[list[int]], dict[str, float]]:
        config = load_ppo_config(overrides(tmp_path, {"data.max_prompt_length": 300, "data.max_response_length": 200}))
        model, rollout = config.actor_rollout_ref.model, replace(config.actor_rollout_ref.rollout, **more)
        for name, value in (worker_environment("cpu", slots=1) | vllm_environment(rollout)).items():
            monkeypatch.setenv(name, value)
        cache = {"kv_cache_memory_bytes": (4 * rows + 1) * CPU_BLOCK * cache_bytes_per_token(model, rollout)}
        rollout = replace(rollout, engine_kwargs=replace(rollout.engine_kwargs, vllm=cache))
        with ProcessPoolExecutor(1, get_context("spawn")) as process:  # an engine lives as long as its process
            return process.submit(sample, model, rollout).result()

    return run


@pytest.mark.drill
def test_a_starved_cache_preempts_requests_and_changes_no_token(sampled):
    ample, plenty = sampled(rows=len(REQUESTS))
    starved, short = sampled(rows=2, enable_prefix_caching=False)
    assert starved == ample
    assert plenty["rollout/preemptions"] == 0 < short["rollout/preemptions"]
    assert plenty["rollout/waiting_requests/max"] <= short["rollout/waiting_requests/max"] > 0
    assert plenty["rollout/kv_cache_usage/max"] < short["rollout/kv_cache_usage/max"] > 0.9
    assert plenty["rollout/running_requests/max"] == len(REQUESTS) > short["rollout/running_requests/max"]
    assert plenty["rollout/tokens_per_s"] > 0
    assert plenty["rollout/prefix_cache_hit_share"] > 0 == short["rollout/prefix_cache_hit_share"]
