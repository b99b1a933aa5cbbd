"""Router replay with real engines: what they return, and an update with it."""

import asyncio
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridrl.config import PPOConfig, load_ppo_config
from hybridrl.config.schema import ModelConfig, RolloutConfig
from hybridrl.core.rollout import Completion, Request, Sampling
from hybridrl.core.rollout.engine import continuation
from hybridrl.core.rollout.vllm.engine import VllmEngine
from hybridrl.core.rollout.vllm.settings import vllm_environment
from hybridrl.runtime.environment import worker_environment
from tests.integration.answers import generate, largest_gap, requests, rows, started, update
from tests.integration.test_unfinished_updates import Sender

pytestmark = pytest.mark.slow

LONG = [int(token) for token in np.random.default_rng(0).integers(3, 60, 300)]  # more than a block of the cache


def own_routes(path: str, token_ids: list[int]) -> np.ndarray:
    """Return the experts that transformers' model chooses [tokens, layers, experts of a token], in ascending order."""
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        scores = model(torch.tensor([token_ids]), output_router_logits=True).router_logits
    chosen = [layer.topk(model.config.num_experts_per_tok).indices for layer in scores]
    return torch.stack(chosen, 1).sort(-1).values.numpy()


def computed(model: ModelConfig, rollout: RolloutConfig) -> dict[str, tuple[list[int], Completion]]:
    """Return responses with the tokens of their prompt."""

    async def run() -> dict[str, tuple[list[int], Completion]]:
        engine, sender = VllmEngine("cpu", model, rollout, 1), Sender(model.path)
        await engine.connect()

        async def load(version: int) -> None:
            await sender.send(engine, 1.0, len(sender.buckets))
            await engine.finish_weights()
            await engine.finish_sync(version, version)

        await load(1)
        plain = Request(0, 0, LONG, 1, Sampling(max_tokens=20, stop_ids=()))
        short = replace(plain, prompt_ids=LONG[:5], prompt=2)
        first, short_one = await asyncio.gather(engine.generate(plain), engine.generate(short))
        later = [*LONG, *first.token_ids.tolist(), 7, 8, 9]
        turn = await engine.generate(replace(plain, prompt_ids=later, turn=1))
        cached = await engine.generate(replace(plain, prompt_ids=LONG[:-3]))
        texts = replace(plain, sampling=replace(plain.sampling, stop=(" ",), max_tokens=40))
        stopped = await engine.generate(texts)
        longer = replace(plain, sampling=replace(plain.sampling, max_tokens=200))
        begun, sampled = asyncio.ensure_future(engine.generate(longer)), await engine.check()
        while await engine.check() < sampled + 150:
            await asyncio.sleep(0.02)
        await engine.interrupt()
        part = await begun
        await load(2)
        whole = part.then(await engine.generate(continuation(longer, part)))
        assert part.interrupted and 0 < len(part.token_ids) < 200
        return {
            "a prompt": (LONG, first),
            "a short one": (LONG[:5], short_one),
            "a later turn": (later, turn),
            "a cached prefix": (LONG[:-3], cached),
            "ended by a text": (LONG, stopped),
            "interrupted": (LONG, part),
            "continued": (LONG, whole),
        }

    return asyncio.run(asyncio.wait_for(run(), 240))


def test_an_engine_returns_the_experts_of_every_token_but_the_last(overrides, mixture, tmp_path, monkeypatch):
    more = {
        "actor_rollout_ref.model.path": mixture,
        "actor_rollout_ref.actor.router_replay.mode": "R3",
        "actor_rollout_ref.rollout.max_model_len": 512,
    }
    config = load_ppo_config(overrides(tmp_path, more))
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    for name, value in (worker_environment("cpu", slots=1) | vllm_environment(rollout)).items():
        monkeypatch.setenv(name, value)
    with ProcessPoolExecutor(1, get_context("spawn")) as process:  # an engine lives as long as its process
        responses = process.submit(computed, model, rollout).result()
    for name, (prompt, response) in responses.items():
        wanted = own_routes(str(mixture), [*prompt, *response.token_ids.tolist()])[:-1]
        routes = np.sort(response.carried["routes"], -1)
        assert routes.shape == wanted.shape, name
        assert (routes == wanted).mean() > 0.999, name  # rounding may decide between two


def gaps(config: PPOConfig, place: Path) -> tuple[float, float, float, float]:
    """Return the largest gap of log-probs between engine and trainer, the same without the engine's experts, which
    share of these the routers would not have chosen, and the first again after an update and a weight sync."""
    with started(config, place) as (trainers, engine):
        wanted, found = requests(1), []
        for version in range(2):
            engine.to_rollout(version)
            batch = rows(wanted, generate(engine, wanted))
            engine.to_training()
            found.append(largest_gap(trainers, batch))
            found.append(largest_gap(trainers, replace(batch, carried={})))
            found.append(update(trainers, batch)["actor/replaced_experts"])
        return found[0], found[1], found[2], found[3]


def test_the_trainer_uses_the_experts_that_the_engine_chose(overrides, mixture, tmp_path):
    more = {
        "actor_rollout_ref.model.path": mixture,
        "actor_rollout_ref.model.external_lib": f"[{Path(__file__).with_name('other_experts.py')}]",
        "actor_rollout_ref.actor.router_replay.mode": "R3",
        "actor_rollout_ref.actor.fsdp_config.expert_parallel_size": 2,
    }
    with_routes, without, replayed, later = gaps(load_ppo_config(overrides(tmp_path, more)), tmp_path)
    assert max(with_routes, later) < 1e-4
    assert without > 1e-2
    assert 0.1 < replayed < 0.5  # of about half the tokens one of two experts, or both
