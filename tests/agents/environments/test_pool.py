"""Episodes in processes of their own, with real Ray actors and a client that responds at once."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from hybridrl.agents.environments.episode_loop import EpisodeLimits
from hybridrl.agents.environments.pool import EpisodeDispatch, EpisodeWorkers
from hybridrl.agents.environments.worker import HEARTBEAT_SECONDS, EpisodeSettings, EpisodeSpec
from hybridrl.core.cluster import RaySession
from hybridrl.core.experience.trajectory import Trajectory
from hybridrl.core.rollout import Completion, Request, Sampling, request_seed
from hybridrl.core.rollout.engine import RejectedRequest
from tests.agents.sections import environments_of

SAMPLING = Sampling(max_tokens=60, stop_ids=(0,))
LIMITS = EpisodeLimits(prompt=200, response=400, context=600, turns=6, call_timeout=2, timeout=30)
ENVIRONMENT = '''
import os, time
from pathlib import Path
from hybridrl.agents.environments import Environment, Step

if Path(__file__).with_name("slowly").exists():
    time.sleep(4)


class Game(Environment):
    """Ends after as many turns as the row has, unless the row wants something else."""

    def step(self, response):
        kind, place = self.row.get("kind"), Path(self.config["place"])
        if kind == "dies" or (kind == "dies once" and not (place / "died").exists()):
            (place / "died").touch()
            os._exit(3)
        if kind == "sleeps":
            time.sleep(1.0)
        if response.turn + 1 == self.row["turns"]:
            return Step(done=True, reward=float(self.row["index"]))
        return Step([{"role": "user", "content": "more"}])

    def close(self):
        if mark := self.row.get("mark"):
            Path(mark).touch()
        return {"turns": self.row["turns"]}
'''


class Sampler:
    """Responds to every request at once, with its seed as text; `count` by turn."""

    def __init__(self, tokenizer, delay: float = 0.0) -> None:
        self.tokenizer, self.delay = tokenizer, delay
        self.requests: list[Request] = []

    def __call__(self, request: Request) -> "asyncio.Future[Completion]":
        self.requests.append(request)
        return asyncio.ensure_future(self._complete(request))

    async def _complete(self, request: Request) -> Completion:
        await asyncio.sleep(self.delay)
        ids = np.array([*self.tokenizer(str(request.seed))["input_ids"], self.tokenizer.eos_token_id])
        return Completion(ids, np.full(len(ids), -0.5, np.float32), False, 1)


@pytest.fixture(scope="module")
def workers(tokenizer, tmp_path_factory) -> Iterator[EpisodeWorkers]:
    place = tmp_path_factory.mktemp("environment")
    (place / "game.py").write_text(ENVIRONMENT)
    tokenizer.save_pretrained(place / "tokenizer")
    load = partial(AutoTokenizer.from_pretrained, str(place / "tokenizer"))
    environments = environments_of(environment=f"{place}/game.py:Game", environment_kwargs={"place": str(place)})
    settings = EpisodeSettings(load, environments, LIMITS, (tokenizer.eos_token_id,), formats={"format": "hermes"})
    session = RaySession("cpu", 1, 2, {}, 60)
    with EpisodeWorkers(session, settings, [f"{place}/episodes-{index}.log" for index in range(2)]) as workers:
        workers.wait_until_ready(120)
        yield workers
    session.close()


def specs(*rows: dict, count: int = 2) -> list[EpisodeSpec]:
    message = [{"role": "user", "content": "Play."}]
    return [
        EpisodeSpec(prompt, sample, message, {"index": prompt, **row}, SAMPLING, 7, prompt)
        for prompt, row in enumerate(rows)
        for sample in range(count)
    ]


def run(workers: EpisodeWorkers, wanted: Sequence[EpisodeSpec], sampler: Sampler, **options) -> list[Trajectory]:
    async def collect() -> list[Trajectory]:
        ended = {}
        with closing(EpisodeDispatch(workers, **options)) as dispatch:
            async for some in dispatch.run(wanted, sampler):
                ended |= dict(some)
        return [ended[index] for index in range(len(wanted))]

    return asyncio.run(collect())


def test_every_episode_ends_with_its_own_environment_and_seeds(workers, tokenizer):
    sampler = Sampler(tokenizer)
    trajectories = run(workers, specs({"turns": 1}, {"turns": 3}), sampler)
    assert [len(one.turns) for one in trajectories] == [1, 1, 3, 3]
    assert [(one.reward, one.metrics) for one in trajectories[1:3]] == [(0.0, {"turns": 1}), (1.0, {"turns": 3})]
    texts = [[tokenizer.decode(turn.sampled[:-1]) for turn in one.turns] for one in trajectories]
    assert texts[0] == [str(request_seed(7, 0, 0))]  # that of a single response
    assert texts[3] == [str(request_seed(7, 1, 1, *turn)) for turn in ([], [1], [2])]
    assert Counter(request.turn for request in sampler.requests) == {0: 4, 1: 2, 2: 2}


def test_turns_are_requested_together_if_batches_must_be_the_same(workers, tokenizer):
    sampler = Sampler(tokenizer)
    run(workers, specs({"turns": 1}, {"turns": 3}, {"turns": 2}), sampler, together=True)
    order = [(request.turn, request.prompt, request.sample) for request in sampler.requests]
    assert order == sorted(order)


def test_plain_functions_that_sleep_do_so_at_the_same_time(workers, tokenizer):
    began = time.monotonic()
    run(workers, specs({"turns": 1, "kind": "sleeps"}, count=40), Sampler(tokenizer))
    assert time.monotonic() - began < 10


def test_a_turn_that_no_engine_can_sample_excludes_its_episode_only(workers, tokenizer):
    class Rejecting(Sampler):
        async def _complete(self, request: Request) -> Completion:
            if (request.prompt, request.sample, request.turn) == (0, 1, 1):
                raise RejectedRequest("the prompt has the token id 999")
            return await super()._complete(request)

    trajectories = run(workers, specs({"turns": 2}, {"turns": 2}), Rejecting(tokenizer))
    assert [one.fault for one in trajectories] == [None, "rejected", None, None]
    assert trajectories[1].detail == "the prompt has the token id 999" and len(trajectories[1].turns) == 1


def test_an_environment_that_ends_its_process_is_excluded_and_the_others_are_run_again(workers, tokenizer):
    trajectories = run(workers, specs({"turns": 2}, {"turns": 2, "kind": "dies"}, count=1), Sampler(tokenizer, 0.2))
    assert [one.fault for one in trajectories] == [None, "died"]
    assert (trajectories[0].reward, len(trajectories[0].turns)) == (0.0, 2)
    assert "the process of its environment died" in trajectories[1].detail


def test_a_replacement_that_starts_slowly_is_not_taken_for_one_that_does_not_respond(workers, tokenizer, capsys):
    place = Path(workers.settings.environments.multi_turn.environment_kwargs["place"])
    (place / "died").unlink(missing_ok=True)
    (place / "slowly").touch()
    limit, workers.limit = workers.limit, 2.0
    trajectories = run(workers, specs({"turns": 2}, {"turns": 2, "kind": "dies once"}), Sampler(tokenizer))
    workers.limit = limit
    (place / "slowly").unlink()
    assert [one.fault for one in trajectories] == [None] * 4
    (lost,) = (line for line in capsys.readouterr().out.splitlines() if "[episode-worker-lost]" in line)
    assert " died: " in lost


def test_an_error_of_the_engines_ends_the_call(workers, tokenizer):
    def fail(request: Request) -> "asyncio.Future[Completion]":
        future = asyncio.get_running_loop().create_future()
        future.set_exception(RuntimeError("no engine is left"))
        return future

    with pytest.raises(RuntimeError, match="no engine is left"):
        run(workers, specs({"turns": 1}), fail)
    assert len(run(workers, specs({"turns": 1}), Sampler(tokenizer))) == 2


class Gate(Sampler):
    """Holds every turn after the first until it is opened."""

    def __init__(self, tokenizer) -> None:
        super().__init__(tokenizer)
        self.opened = asyncio.Event()

    async def _complete(self, request: Request) -> Completion:
        if request.turn:
            await self.opened.wait()
        return await super()._complete(request)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_call_in_another_thread_does_not_disturb_episodes_that_are_held(workers, tokenizer):
    gate = Gate(tokenizer)
    with closing(EpisodeDispatch(workers)) as dispatch:
        held = dispatch.start(specs({"turns": 2}, {"turns": 3}), gate)
        await until(lambda: len(gate.requests) == 8)
        other = await asyncio.to_thread(run, workers, specs({"turns": 2}), Sampler(tokenizer))
        assert [len(one.turns) for one in other] == [2, 2] and not any(future.done() for future in held)
        gate.opened.set()
        found = await asyncio.gather(*held)
    assert [len(one.turns) for one in found] == [2, 2, 3, 3]


async def test_episodes_are_started_while_others_run(workers, tokenizer):
    gate = Gate(tokenizer)
    with closing(EpisodeDispatch(workers)) as dispatch:
        first = dispatch.start(specs({"turns": 2}), gate)
        await until(lambda: len(gate.requests) == 4)
        began = time.monotonic()
        (later,) = dispatch.start(specs({"turns": 1}, count=1), gate)
        assert len((await later).turns) == 1 and not any(future.done() for future in first)
        assert time.monotonic() - began < HEARTBEAT_SECONDS / 2  # no call that waits for a process is waited for
        gate.opened.set()
        await asyncio.gather(*first)
        assert not any(lane.jobs or lane.pump for lane in dispatch.lanes)
        (last,) = dispatch.start(specs({"turns": 1}, count=1), gate)
        assert len((await last).turns) == 1


async def test_episodes_are_abandoned_when_their_dispatch_is_closed(workers, tokenizer, tmp_path):
    gate = Gate(tokenizer)
    with closing(EpisodeDispatch(workers)) as dispatch:
        dispatch.start(specs({"turns": 2, "mark": str(tmp_path / "closed")}, count=1), gate)
        await until(lambda: len(gate.requests) == 2)
    await until((tmp_path / "closed").exists)


@pytest.mark.slow
async def test_a_process_that_two_dispatches_lose_is_replaced_once(workers, tokenizer):
    place = Path(workers.settings.environments.multi_turn.environment_kwargs["place"])
    (place / "died").unlink(missing_ok=True)
    gate, before = Gate(tokenizer), list(workers.actors)
    with closing(EpisodeDispatch(workers)) as dispatch:
        held = dispatch.start(specs({"turns": 2}), gate)
        await until(lambda: len(gate.requests) == 4)
        run_other = partial(run, workers, specs({"turns": 1, "kind": "dies once"}, count=1), Sampler(tokenizer))
        (other,) = await asyncio.to_thread(run_other)
        assert other.fault is None
        await until(lambda: len(gate.requests) == 6)  # of the episode in that process, again
        after = list(workers.actors)
        gate.opened.set()
        trajectories = await asyncio.gather(*held)
        assert workers.actors == after and after[0] is not before[0] and after[1] is before[1]
        assert [(one.fault, len(one.turns)) for one in trajectories] == [(None, 2)] * 2
