"""Conversations that outlive a step, or the process: groups share a dispatch, and turns are found again by their place.

Episodes run in a worker that is an object of this process; the client is real, and its server samples at each `step`.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.agents.environments.conversations import Conversations
from hybridrl.agents.environments.episode_loop import EpisodeLimits
from hybridrl.agents.environments.worker import EpisodeSettings, EpisodeWorker
from hybridrl.core.experience.episodes import EpisodeRunner
from hybridrl.core.experience.responses import ResponseStore
from hybridrl.core.experience.trajectory import Episode
from hybridrl.core.rollout import Request, RolloutClient, Sampling, request_seed
from hybridrl.data.prompts import Prompt
from tests.agents.environments import conftest as environments
from tests.agents.sections import environments_of
from tests.core.experience.test_episodes import Scorers
from tests.core.rollout.test_client import PatientServer

SEED, POSITION = 7, 5
SAMPLING = Sampling(max_tokens=4, stop_ids=(0,))
LIMITS = EpisodeLimits(prompt=200, response=400, context=600, held=True)
ECHO = f"{Path(__file__).parents[2] / 'integration' / 'agents.py'}:Echo"

tokenizer, tokenizer_of = environments.tokenizer, environments.tokenizer_of


class Remote:
    """An actor that is an object here: its calls are tasks of the caller's event loop."""

    def __init__(self, actor: EpisodeWorker) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> SimpleNamespace:
        method = getattr(self.actor, name)
        return SimpleNamespace(remote=lambda *arguments: asyncio.ensure_future(method(*arguments)))


class Workers:
    """One process of episodes, in this one."""

    def __init__(self, tokenizer: Any) -> None:
        worker = object.__new__(EpisodeWorker)  # without what its process needs
        ends = (tokenizer.eos_token_id,)
        self.settings = EpisodeSettings(lambda: tokenizer, environments_of(environment=ECHO), LIMITS, ends)
        worker.begin(self.settings)
        self.worker, self.actors, self.logs, self.starting = worker, [Remote(worker)], ["log"], set()

    def limit_of(self, actor: Any) -> float:
        return 60.0


class Server(PatientServer):
    """Samples at once while it is `eager`."""

    eager = False

    def submit(self, requests: list[tuple[int, Request]], goal: Any = None) -> None:
        super().submit(requests, goal)
        self.step(4 * self.eager)


class Process:
    """What a process has: server, client, worker and the responses that it keeps."""

    def __init__(self, tokenizer: Any, state: dict[str, Any] | None = None) -> None:
        self.server, self.workers, self.carried = Server(), Workers(tokenizer), ResponseStore(carries=True)
        self.carried.load_state_dict(state or {})
        self.client = RolloutClient([self.server], lambda _: self.server, capacity=100, timeout=60.0, retries=2)
        self.runner = EpisodeRunner(
            self.client, Scorers(), SEED, conversations=Conversations(self.workers, self.client, SEED)
        )

    def start(self, text: str = "Play.", position: int = POSITION, turns: int = 2) -> asyncio.Task[list[Episode]]:
        chat = [{"role": "user", "content": text}]
        prompt = Prompt(0, [1], chat, "any", "1", {}, columns={"turns": turns})
        return asyncio.create_task(self.runner.group(prompt, position, 1, SAMPLING, self.carried))

    async def sample(self, requests: int, tokens: int) -> None:
        """Wait until so many requests have arrived, and sample so many tokens of the last ones."""
        await until(lambda: len(self.server.requests) == requests)
        self.server.step(tokens)

    async def interrupted(self) -> dict[str, Any]:
        """Interrupt all, and return what a checkpoint has then."""
        await self.client.interrupt()
        paused = self.client.paused()
        return self.carried.state_dict([(request, begun) for request, begun in paused if begun is not None])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def sampled(episodes: list[Episode]) -> list[list[int]]:
    (episode,) = episodes
    return [turn.sampled.tolist() for turn in episode.trajectory.turns]


async def stopped_in_the_second_turn(tokenizer: Any) -> dict[str, Any]:
    """Return the checkpoint of a process that has one turn, and two tokens of the next."""
    first = Process(tokenizer)
    task = first.start()
    await first.sample(1, 4)
    await first.sample(2, 2)
    state = await first.interrupted()
    await first.runner.close()
    task.cancel()
    return state


async def test_a_resumed_run_uses_finished_turns_again_and_continues_the_interrupted_one(tokenizer):
    state = await stopped_in_the_second_turn(tokenizer)
    second = Process(tokenizer, state)
    second.server.version = 3
    task = second.start()
    await second.sample(1, 2)
    episodes = await task
    (request,) = second.server.requests
    assert (request.prompt, request.sample, request.turn, request.begun) == (POSITION, 0, 1, 2)
    assert request.seed == request_seed(request_seed(SEED, POSITION, 0, 1), 2)
    assert sampled(episodes) == [[0, 1, 2, 3], [0, 1, 2, 3]]
    versions = [turn.token_versions.tolist() for turn in episodes[0].trajectory.turns]
    assert versions == [[0] * 4, [0, 0, 3, 3]]
    assert (episodes[0].position, episodes[0].score.value) == (POSITION, 0.5)


async def test_turns_of_another_conversation_at_the_same_place_are_not_used(tokenizer):
    second = Process(tokenizer, await stopped_in_the_second_turn(tokenizer))
    task = second.start(text="Play on.")
    await second.sample(1, 4)
    await second.sample(2, 4)
    await task
    assert [(one.turn, one.begun) for one in second.server.requests] == [(0, 0), (1, 0)]
    assert second.server.requests[0].seed == request_seed(SEED, POSITION, 0)


async def test_a_validation_runs_while_a_conversation_is_held(tokenizer):
    process = Process(tokenizer)
    task = process.start()
    await process.sample(1, 4)
    await process.sample(2, 2)
    await process.client.interrupt()
    conversations = Conversations(process.workers, process.client, SEED)
    other = EpisodeRunner(process.client, Scorers(), SEED, conversations=conversations)
    prompt = Prompt(1, [1], [{"role": "user", "content": "Validate."}], "any", "1", {}, columns={"turns": 1})
    process.server.eager, process.server.ready = True, None  # a queue belongs to one event loop
    found, _ = await asyncio.to_thread(other.run, [prompt], 1, SAMPLING, [0], None, "validation")
    assert sampled(found) == [[0, 1, 2, 3]] and not task.done()
    process.server.eager, process.server.ready = False, None
    process.client.resume()
    await process.sample(4, 2)
    assert sampled(await task) == [[0, 1, 2, 3], [0, 1, 2, 3]]


async def test_groups_share_a_dispatch_and_are_abandoned_when_it_is_closed(tokenizer):
    process = Process(tokenizer)
    tasks = [process.start(position=position, turns=turns) for position, turns in ((0, 1), (1, 2))]
    await process.sample(2, 4)
    await tasks[0]
    await until(lambda: len(process.server.requests) == 3)
    assert len(process.workers.worker.calls) == 1
    await process.runner.close()
    await until(lambda: not process.workers.worker.calls)
    assert process.client.paused() == [] and not tasks[1].done()
    tasks[1].cancel()


async def test_an_error_of_the_engines_ends_every_group(tokenizer):
    process = Process(tokenizer)
    tasks = [process.start(position=position) for position in range(2)]
    await process.sample(2, 2)
    process.client.fail(RuntimeError("no engine is left"))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert list(map(str, results)) == ["no engine is left"] * 2
    with pytest.raises(RuntimeError, match="no engine is left"):
        await process.start(position=2)
    await process.runner.close()
