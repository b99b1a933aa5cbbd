"""The interface of a rollout engine, and where the class of one is found.

To add one, write a package whose class has the methods of RolloutEngine, and name its EngineEntry `engine.NAME` in
runs/plugins.py, or by an entry point of another distribution.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from hybridrl.config.schema import ModelConfig, RolloutConfig
from hybridrl.core.rollout.statistics import EngineStats
from hybridrl.core.rollout.types import Completion, Goal, Request
from hybridrl.core.weights.buckets import Bucket, Handle


class RolloutEngine(Protocol):
    """An engine over one tensor-parallel group of devices, in the process of its rollout server.

    It is made with dummy weights: `connect` is called once, and weights come from the trainer at every weight sync.
    A call raises if the engine is dead.
    """

    async def connect(self) -> None:
        """Prepare to receive weights."""

    async def renew(self, log_file: str) -> None:
        """Become what `connect` made of the new engine, for the run's next attempt, and write to its log."""

    async def generate(self, request: Request) -> Completion:
        """Sample one response; called for many requests at a time. RequestFault if the engine rejects this one. It is
        queued before this first waits, which `hold` and `release` need."""

    async def score(self, token_ids: list[int]) -> list[float]:
        """Return the log-probs of the tokens of a sequence after its first one, without sampling."""

    async def hold(self) -> None:
        """Queue requests without starting them, with an empty prefix cache."""

    async def release(self, goal: Goal | None = None) -> None:
        """Start all queued requests, and interrupt them by itself once the goal is reached."""

    async def interrupt(self) -> None:
        """End all requests now: `generate` returns their responses so far, which may be continued later."""

    async def sleep(self) -> None:
        """Drop the cache and free device memory until `wake`."""

    async def wake(self, part: str) -> None:
        """Allocate memory for `weights` or `kv_cache`; the engine can generate once it has both."""

    async def begin_weights(self) -> None:
        """Prepare for the buckets of the whole model."""

    async def join_trainer(self, address: str, first_rank: int, size: int, seconds: float) -> None:
        """Form a group with the training rank that will send buckets, which listens at the address; `first_rank` is
        that of this engine's first device."""

    async def load_bucket(
        self, bucket: Bucket, handles: list[Handle | None], digests: list[int], adapter: bool
    ) -> None:
        """Load one bucket of the model, or of its adapter, from the trainers' memory, or as it is sent to the group if
        there is no handle; one handle and one digest per device of this engine. RuntimeError if the bytes differ from
        those that were sent."""

    async def finish_weights(self) -> None:
        """Finish loading the whole model, also if buckets are missing."""

    async def finish_sync(self, sync_id: int, version: int) -> None:
        """Use the loaded weights from now on, with an empty prefix cache. Tokens are then sampled with `version`."""

    async def held_sync(self) -> int:
        """Return the id of the weight sync whose weights the engine uses."""

    async def check(self) -> int:
        """Return the tokens that it has sampled so far, which grow while it works; RuntimeError if it is dead."""

    async def take_stats(self) -> EngineStats:
        """Return what it did since the last call."""


@dataclass(frozen=True)
class EngineEntry:
    """Where an engine's class is, which is imported in the server's process only, and what its environment must be."""

    module: str
    name: str
    environment: Callable[[RolloutConfig], dict[str, str]]

    def build(self, device: str, model: ModelConfig, rollout: RolloutConfig, engines_per_machine: int) -> RolloutEngine:
        return vars(import_module(self.module))[self.name](device, model, rollout, engines_per_machine)
