"""Conversations as the core has them sampled, in processes of their own, every turn by the engines; their metrics under
verl's names, and transcripts for the files of samples."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from hybridrl.agents.environments import CallRecord
from hybridrl.agents.environments.load import EpisodeRow, runs_function
from hybridrl.agents.environments.pool import EpisodeDispatch, EpisodeWorkers
from hybridrl.agents.environments.worker import EpisodeSettings, EpisodeSpec
from hybridrl.core.experience.responses import ResponseStore
from hybridrl.core.experience.trajectory import (
    STOPS,
    Episode,
    EpisodeRequest,
    Finished,
    OnScore,
    Sampler,
    Source,
    Trajectory,
)
from hybridrl.core.pictures import Picture, PictureStore
from hybridrl.core.rollout import Completion, Request
from hybridrl.data.pictures import Encoded
from hybridrl.data.prompts import Prompt
from hybridrl.data.tokenizer import as_chat


def conversation_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return turns, tokens, tools, seconds and reasons of stopping of episodes that ran in environments; empty for
    single responses. Seconds are those of whole episodes; `slowest` is the episode that took longest."""
    trajectories = [episode.trajectory for episode in episodes if episode.trajectory.text is not None]
    if not trajectories:
        return {}
    turns = [len(trajectory.turns) for trajectory in trajectories]
    calls = [call for trajectory in trajectories for turn in trajectory.turns for call in turn.calls]
    sampled = [trajectory.sampled_tokens for trajectory in trajectories]
    observed = [sum(len(turn.observed) for turn in trajectory.turns[1:]) for trajectory in trajectories]
    model, tools = ([_seconds(one, name) for one in trajectories] for name in ("seconds_model", "seconds_tools"))
    slowest = int(np.argmax(np.add(model, tools)))
    return (
        _spread("num_turns", turns)
        | _spread("tool_call_counts", [sum(len(turn.calls) for turn in one.turns) for one in trajectories])
        | _spread("agent_loop/generate_sequences", model)
        | _spread("agent_loop/tool_calls", tools)
        | {"agent_loop/slowest/generate_sequences": model[slowest], "agent_loop/slowest/tool_calls": tools[slowest]}
        | {"agent_loop/slowest/response_length": float(sampled[slowest])}
        | _spread("episode/sampled_tokens", sampled)
        | _spread("episode/observed_tokens", observed)
        | _spread("episode/rows", [1 + sum(turn.fresh for turn in trajectory.turns) for trajectory in trajectories])
        | _spread("tokens_per_turn", [len(turn.sampled) for trajectory in trajectories for turn in trajectory.turns])
        | _stops(trajectories)
        | _tools(calls)
        | _environments(trajectories)
    )


def transcript(trajectory: Trajectory) -> dict[str, Any]:
    """Return the conversation of an episode for a file of samples: messages and turns; empty for a single response."""
    if trajectory.text is None:
        return {}
    return {
        "messages": list(trajectory.messages),
        "turns": [
            {
                "observed_tokens": len(turn.observed),
                "sampled_tokens": len(turn.sampled),
                "reward": turn.reward,
                "calls": [_call(call) for call in turn.calls],
                "stop": turn.stop,
                "seconds": [round(turn.seconds_model, 3), round(turn.seconds_tools, 3)],
            }
            for turn in trajectory.turns
        ],
    }


def _call(record: CallRecord) -> dict[str, Any]:
    call = {"name": record.call.name, "arguments": dict(record.call.arguments), "result": record.result}
    return call | {"outcome": record.outcome, "seconds": round(record.seconds, 3), "reward": record.reward}


def _seconds(trajectory: Trajectory, name: str) -> float:
    return sum(vars(turn)[name] for turn in trajectory.turns)


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    kinds = {"min": min(values), "max": max(values), "mean": sum(values) / len(values)}
    return {f"{name}/{kind}": float(value) for kind, value in kinds.items()}


def _stops(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    counts = Counter(trajectory.stop for trajectory in trajectories)
    return {f"stop/{reason}": counts[reason] / len(trajectories) for reason in STOPS if counts[reason]}


def _tools(calls: Sequence[CallRecord]) -> dict[str, float]:
    """Return calls, failures by kind, and seconds of each tool. Names of which no call was valid count as one: the
    policy may invent any number of them."""
    valid_names = {record.call.name for record in calls if record.outcome != "invalid"}
    by_name: dict[str, list[CallRecord]] = defaultdict(list)
    for record in calls:
        by_name[record.call.name if record.call.name in valid_names else "unknown"].append(record)
    metrics = {}
    for name, records in by_name.items():
        outcomes, seconds = Counter(record.outcome for record in records), [record.seconds for record in records]
        counted = {"calls": len(records), "errors": outcomes["error"], "invalid": outcomes["invalid"]}
        counted |= {"timeouts": outcomes["timeout"], "skipped": outcomes["skipped"]}
        counted |= {f"seconds_p{share}": float(np.percentile(seconds, share)) for share in (50, 90)}
        metrics |= {f"tools/{name}/{key}": float(value) for key, value in counted.items()}
    return metrics


def _environments(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean of each metric that environments gave, over the episodes that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values[name].append(float(value))
    return {f"environment/{name}": sum(each) / len(each) for name, each in values.items()}


class Conversations:
    """Episodes of the processes `workers`, whose seeds derive from `seed` (see core.experience.trajectory); `store` has
    the pixels of their pictures."""

    metrics, transcript = staticmethod(conversation_metrics), staticmethod(transcript)

    def __init__(self, workers: EpisodeWorkers, client: Sampler, seed: int, store: PictureStore | None = None) -> None:
        self.workers, self.client, self.seed, self.store = workers, client, seed, store
        self.groups: EpisodeDispatch | None = None  # they outlive one another

    def source(self, requests: Sequence[EpisodeRequest], store: ResponseStore, *, grouped: bool = False) -> Source:
        prompts = {request.number: request.prompt for request in requests}
        chats = {number: as_chat(prompt.messages) for number, prompt in prompts.items()}
        rows = {number: _row(prompt) for number, prompt in prompts.items()}
        pictures = {
            number: _pictures(prompt, rows[number], self.workers.settings) for number, prompt in prompts.items()
        }
        specs = [
            EpisodeSpec(
                number,
                one.sample,
                chats[number],
                rows[number],
                one.sampling,
                self.seed,
                one.seed_key,
                *pictures[number],
            )
            for number, one in ((request.number, request) for request in requests)
        ]
        client, options = self.client, {"check": self.client.check, "store": self.store}
        if not grouped:
            own = EpisodeDispatch(self.workers, together=client.fixed, **options)
            return SampledTurns(client, closing(own), specs, store)
        if self.groups is None:
            self.groups = EpisodeDispatch(self.workers, paused=lambda: bool(client.paused()), **options)
        return SampledTurns(client, nullcontext(self.groups), specs, store)

    def close(self) -> None:
        if self.groups is not None:
            self.groups.close()
            self.groups = None


@dataclass
class SampledTurns:
    """The episodes of one call, with every turn sampled by the engines."""

    client: Sampler
    dispatch: AbstractContextManager[EpisodeDispatch]
    specs: Sequence[EpisodeSpec]
    store: ResponseStore

    async def finished(self) -> AsyncIterator[list[Finished]]:
        with self.dispatch as dispatch:
            async for arrived in dispatch.run(self.specs, self._sample):
                yield [(index, trajectory, None) for index, trajectory in arrived]

    def scoring_started(self, episodes: Sequence[tuple[int, Trajectory]]) -> OnScore:
        return lambda index, score: None  # turns are stored as they are sampled

    def _sample(self, request: Request) -> asyncio.Future[Completion]:
        stored = self.store.find(request)
        if stored is not None and not stored.completion.interrupted:
            future = asyncio.get_running_loop().create_future()
            future.set_result(stored.completion)
            return future
        future = self.client.generate(request, None if stored is None else stored.completion)
        future.add_done_callback(partial(self._keep, request))
        return future

    def _keep(self, request: Request, done: asyncio.Future[Completion]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.store.add(request, done.result())


def _pictures(prompt: Prompt, row: EpisodeRow, settings: EpisodeSettings) -> tuple[list[Picture], list[Encoded]]:
    """Return the names of a prompt's pictures; and how the row has them, for an agent that sends messages itself."""
    named = [replace(picture, pixels=None, preview=None) for picture in prompt.pictures]
    return named, [*prompt.encoded.values()] if runs_function(row, settings.environments) else []


def _row(prompt: Prompt) -> dict[str, Any]:
    """Return all columns of a prompt's row, with those that environments read under verl's names."""
    columns = {"data_source": prompt.data_source, "extra_info": prompt.extra_info, "ground_truth": prompt.ground_truth}
    return prompt.columns | columns | {"index": prompt.row}
