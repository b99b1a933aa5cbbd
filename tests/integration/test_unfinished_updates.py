"""A real engine whose trainers die while they send weights: what the next ones send is what it computes with."""

import asyncio
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.config import load_ppo_config
from hybridrl.config.schema import ModelConfig, RolloutConfig
from hybridrl.core.rollout.vllm.engine import VllmEngine
from hybridrl.core.rollout.vllm.settings import vllm_environment
from hybridrl.core.weights.buckets import SharedBuffer, buffer_bytes, digest, plan_buckets
from hybridrl.runtime.environment import worker_environment

PROBE = [1, 20, 30, 40]


class Sender:
    """Sends a model's weights, times a factor, to an engine, as training ranks do."""

    def __init__(self, path: str) -> None:
        self.weights = {name: w for file in Path(path).glob("*.safetensors") for name, w in load_file(file).items()}
        sizes = [(name, tensor.shape, tensor.dtype) for name, tensor in self.weights.items()]
        self.buckets = plan_buckets(sizes, 1)  # a layer each
        self.buffer = SharedBuffer(buffer_bytes(self.buckets), torch.device("cpu"))

    async def send(self, engine: VllmEngine, factor: float, count: int, spoil: bool = False) -> None:
        await engine.begin_weights()
        for bucket in self.buckets[:count]:
            part = bucket.view(self.buffer.tensor)
            bucket.clear_gaps(self.buffer.tensor)
            for tensor in bucket.tensors:
                tensor.view(part).copy_(self.weights[tensor.name] * factor)
            await engine.load_bucket(bucket, [self.buffer.handle], [digest(part) + spoil], False)


def scores(model: ModelConfig, rollout: RolloutConfig) -> tuple[list[list[float]], list[list[float]]]:
    """Return the probe's scores after undisturbed updates by two factors, and after updates by the second of them that
    each follow another one, by the first, which stops half-way in some way."""

    async def run() -> tuple[list[list[float]], list[list[float]]]:
        engine, sender = VllmEngine("cpu", model, rollout, 1), Sender(model.path)
        await engine.connect()
        every = len(sender.buckets)

        async def update(factor: float) -> list[float]:
            await sender.send(engine, factor, every)
            await engine.finish_weights()
            await engine.finish_sync(1, 1)
            return await engine.score(PROBE)

        plain, after = [await update(0.5), await update(2.0)], []
        for count, spoil in [(0, False), (1, False), (every, False), (1, True), (every, True)]:
            try:
                await sender.send(engine, 0.5, count, spoil)
            except RuntimeError as error:
                assert "digests differ" in str(error)
            await engine.finish_weights()
            after.append(await update(2.0))
        return plain, after

    return asyncio.run(asyncio.wait_for(run(), 240))


@pytest.mark.slow
def test_after_an_update_that_stopped_half_way_the_next_one_is_loaded_whole(overrides, tmp_path, monkeypatch):
    config = load_ppo_config(overrides(tmp_path, {}))
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    for name, value in (worker_environment("cpu", slots=1) | vllm_environment(rollout)).items():
        monkeypatch.setenv(name, value)
    with ProcessPoolExecutor(1, get_context("spawn")) as process:  # an engine lives as long as its process
        (first, second), after = process.submit(scores, model, rollout).result()
    assert first != second
    assert after == [second] * 5
