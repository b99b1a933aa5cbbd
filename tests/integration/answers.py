"""Responses from real engines, and rows to train on, for tests of the switch."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from hybridrl.config import PPOConfig
from hybridrl.core.batch import Batch
from hybridrl.core.carried import Encoded
from hybridrl.core.cluster.dispatch import in_lists
from hybridrl.core.experience.batching import group_by_prompt, to_batch
from hybridrl.core.experience.trajectory import Episode, Trajectory, Turn
from hybridrl.core.hybrid_engine import HybridEngine
from hybridrl.core.rollout import Completion, Request, Sampling, request_seed
from hybridrl.core.training.worker_group import RankPlan, TrainWorkers
from hybridrl.data.prompts import Prompt
from hybridrl.rewards.score import Score
from hybridrl.runs.ppo import probe_ids, start_devices
from hybridrl.runs.settings import build_algorithm, build_policy_plan, ppo_worker_config
from hybridrl.runs.setup import start_session

PROMPT = [1, 20, 30, 40, 50, 60, 70]
SAMPLING = Sampling(max_tokens=16, stop_ids=(2,))


def requests(prompts: int = 6, samples: int = 3) -> list[Request]:
    return [
        Request(p, s, [*PROMPT, 3 + p], request_seed(1, p, s), SAMPLING) for p in range(prompts) for s in range(samples)
    ]


def generate(engine: HybridEngine, wanted: list[Request]) -> dict[tuple[int, int], Completion]:
    completions = engine.client.generate_all(wanted)
    return {
        (request.prompt, request.sample): completion for request, completion in zip(wanted, completions, strict=True)
    }


def rows(wanted: list[Request], responses: dict[tuple[int, int], Completion]) -> Batch:
    """Responses as a batch, with a reward that differs within a group."""
    episodes = []
    for request in wanted:
        prompt = Prompt(request.prompt, request.prompt_ids, "", "", "", {})
        response = responses[request.prompt, request.sample]
        trajectory = Trajectory([Turn.of(Encoded(prompt.ids), response)])
        episodes.append(Episode(prompt, request.prompt, request.sample, trajectory, "", Score(float(request.sample))))
    return to_batch(group_by_prompt(episodes))


def update(workers: TrainWorkers, batch: Batch) -> dict[str, float]:
    batch.advantages = (batch.rewards - 1.0)[batch.response_row]
    return workers.update_policy(batch, 1)[1]


def largest_gap(workers: TrainWorkers, batch: Batch) -> float:
    scored = workers.forward_log_probs(batch)
    return float((scored.old_log_probs - batch.rollout_log_probs)[batch.response_mask].abs().max())


@contextmanager
def started(config: PPOConfig, place: Path) -> Iterator[tuple[TrainWorkers, HybridEngine]]:
    """Start the devices of a run, in a Ray of their own."""
    (place / "logs").mkdir()
    session = start_session(config.trainer, config.ray_kwargs.ray_init)
    try:
        worker = ppo_worker_config(config, build_algorithm(config), place, steps=1)
        workers, engine = start_devices(config, session, worker, place / "logs", probe_ids(PROMPT))
        yield TrainWorkers(workers, RankPlan(worker.models, build_policy_plan(config)), "float32", 120), engine
    finally:
        session.close()


@contextmanager
def sending(engine: HybridEngine, send: Callable[[Sequence[int]], None]) -> Iterator[None]:
    """Have weight syncs in the block send weights to engines in another way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.sync, "send_all", send)
        yield


def generate_disturbed(
    engine: HybridEngine, wanted: list[Request], disturb: Callable[[], object]
) -> dict[tuple[int, int], Completion]:
    """Return the responses as `generate` does; `disturb` is called once the first of them have arrived."""
    responses: dict[tuple[int, int], Completion] = {}

    async def collect() -> None:
        async for arrived in in_lists(map(engine.client.generate, wanted)):
            if not responses:
                disturb()
            responses.update({(wanted[index].prompt, wanted[index].sample): one.result() for index, one in arrived})

    asyncio.run(collect())
    return responses


def tokens(responses: dict[tuple[int, int], Completion]) -> dict[tuple[int, int], list[int]]:
    return {key: response.token_ids.tolist() for key, response in sorted(responses.items())}
