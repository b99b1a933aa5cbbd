"""Conversations as the core has them sampled: in processes of their own, every turn by the engines."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from hybridrl.agents.environments import metrics
from hybridrl.agents.environments.pool import EpisodeDispatch, EpisodeWorkers
from hybridrl.agents.environments.worker import EpisodeSpec
from hybridrl.core.experience.responses import ResponseStore
from hybridrl.core.experience.trajectory import Ended, EpisodeRequest, Source, Trajectory
from hybridrl.core.rollout import Completion, Request, RolloutClient
from hybridrl.data.prompts import Prompt
from hybridrl.data.tokenizer import as_chat
from hybridrl.rewards.score import Score


class Conversations:
    """Episodes of the processes `workers`, whose seeds derive from `seed` (see core.experience.trajectory)."""

    metrics, transcript = staticmethod(metrics.conversation_metrics), staticmethod(metrics.transcript)

    def __init__(self, workers: EpisodeWorkers, client: RolloutClient, seed: int) -> None:
        self.workers, self.client, self.seed = workers, client, seed
        self.groups: EpisodeDispatch | None = None  # they outlive one another

    def source(self, requests: Sequence[EpisodeRequest], store: ResponseStore, *, grouped: bool = False) -> Source:
        prompts = {one.number: one.prompt for one in requests}
        chats = {number: as_chat(prompt.messages) for number, prompt in prompts.items()}
        rows = {number: _row(prompt) for number, prompt in prompts.items()}
        specs = [
            EpisodeSpec(
                one.number, one.sample, chats[one.number], rows[one.number], one.sampling, self.seed, one.seed_key
            )
            for one in requests
        ]
        client = self.client
        if not grouped:
            own = EpisodeDispatch(self.workers, together=client.fixed, check=client.check)
            return SampledTurns(client, closing(own), specs, store)
        if self.groups is None:
            self.groups = EpisodeDispatch(self.workers, held=lambda: bool(client.held()), check=client.check)
        return SampledTurns(client, nullcontext(self.groups), specs, store)

    def close(self) -> None:
        if self.groups is not None:
            self.groups.close()
            self.groups = None


@dataclass
class SampledTurns:
    """The episodes of one call, with every turn sampled by the engines."""

    client: RolloutClient
    dispatch: AbstractContextManager[EpisodeDispatch]
    specs: Sequence[EpisodeSpec]
    store: ResponseStore

    async def ended(self) -> AsyncIterator[list[Ended]]:
        with self.dispatch as dispatch:
            async for some in dispatch.run(self.specs, self._sample):
                yield [(index, trajectory, None) for index, trajectory in some]

    def scoring(self, index: int, trajectory: Trajectory, score: Future[Score]) -> None: ...

    def _sample(self, request: Request) -> asyncio.Future[Completion]:
        known = self.store.find(request)
        if known is not None and not known.completion.interrupted:
            future = asyncio.get_running_loop().create_future()
            future.set_result(known.completion)
            return future
        future = self.client.generate(request, None if known is None else known.completion)
        future.add_done_callback(partial(self._keep, request))
        return future

    def _keep(self, request: Request, done: asyncio.Future[Completion]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.store.add(request, done.result())


def _row(prompt: Prompt) -> dict[str, Any]:
    """Return all columns of a prompt's row, with those that environments read under verl's names."""
    known = {"data_source": prompt.data_source, "extra_info": prompt.extra_info, "ground_truth": prompt.ground_truth}
    return prompt.columns | known | {"index": prompt.row}
