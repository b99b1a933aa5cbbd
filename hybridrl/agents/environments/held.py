"""A policy that may be held while the devices train: the time that an episode waits for it does not count."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hybridrl.core.experience.trajectory import Policy
from hybridrl.core.rollout import Completion


@dataclass
class HeldPolicy:
    """The policy of an episode whose time limit `clock` stands still while a turn is sampled."""

    policy: Policy
    clock: asyncio.Timeout

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        with stopped(self.clock):
            return await self.policy.generate(prompt_ids, max_tokens=max_tokens, stop=stop)


@contextlib.contextmanager
def stopped(clock: asyncio.Timeout) -> Iterator[None]:
    """Stop a time limit, and continue it with the time that was left."""
    now, end = asyncio.get_running_loop().time, clock.when()
    if end is None or clock.expired():
        yield
        return
    left = end - now()
    clock.reschedule(None)
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # the episode has ended meanwhile
            clock.reschedule(now() + left)
