"""A rollout server: an actor around one engine. Responses are requested in one call and fetched in another as they
finish; every other method of the engine is reached through `call`."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hybridrl.config.schema import ModelConfig, RolloutConfig
from hybridrl.core.pictures import NO_PIXELS, Pixels
from hybridrl.core.rollout.engine import (
    Completion,
    EngineEntry,
    Goal,
    RejectedRequest,
    Request,
    RequestFault,
    RolloutEngine,
)
from hybridrl.core.rollout.ladder import EngineOutOfMemory, logged, shortage
from hybridrl.core.spinning import give_way
from hybridrl.required import required
from hybridrl.runtime.guard import begin_actor, oom_kills
from hybridrl.runtime.keeper import work_in_private

# A pause before finished responses are returned lets more of them finish: a remote call costs more than a response.
COALESCE_SECONDS = 0.02

Ticket = int  # names a request between client and server
NO_HANDLES: Mapping[int, Awaitable[Pixels]] = MappingProxyType({})
CONTROL: Ticket = -1  # for control calls, which have no request


class RolloutServer:
    """The process of one engine; `start` builds it, `submit` and `take` generate, `call` reaches all other methods."""

    def __init__(self, log_file: str) -> None:
        begin_actor(log_file)
        work_in_private()  # an engine leaves its sockets behind, and its processes if this one is killed
        self.begin(Path(log_file))

    def begin(self, log: Path) -> None:
        """Initialise without an engine, which `start` builds; the log has lines of earlier servers."""
        self.log, self.log_start, self.oom_kills = log, log.stat().st_size, oom_kills()
        self.shortage = ""  # the out-of-memory error of the engine, if any: it must be rebuilt, even if it lives
        self.engine: RolloutEngine | None = None
        self.finished: asyncio.Queue[tuple[Ticket, Completion | Exception]] = asyncio.Queue()
        self.running: set[asyncio.Task] = set()
        self.entering = asyncio.Lock()  # calls take effect in their order, also those that wait for pixels

    async def start(
        self,
        entry: EngineEntry,
        device: str,
        gpus: list[str],
        model: ModelConfig,
        rollout: RolloutConfig,
        engines_per_machine: int,
    ) -> int:
        """Build the engine, whose weights arrive later. Returns this process's id."""
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if device == "cpu":
            give_way()
        self.fixed = rollout.full_determinism
        with self._explained():
            self.engine = entry.build(device, model, rollout, engines_per_machine)
            await self.engine.connect()
        return os.getpid()

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the engine."""
        if self.shortage:
            raise EngineOutOfMemory(self.shortage)
        with self._explained():
            return await getattr(self.engine, method)(*args)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # an engine may raise anything
            if failure := self._out_of_memory(error):
                raise failure from error
            raise

    def _out_of_memory(self, error: Exception) -> EngineOutOfMemory | None:
        """Return the failure of the engine if it ran out of memory, else None. Its processes log such errors."""
        self.shortage = shortage([f"{type(error).__name__}: {error}", *logged(self.log, self.log_start)])
        if not self.shortage and oom_kills() != self.oom_kills:
            self.shortage = "the kernel killed a process of its machine for lack of memory"
        return EngineOutOfMemory(self.shortage) if self.shortage else None

    async def submit(
        self,
        requests: list[tuple[Ticket, Request]],
        goal: Goal | None = None,
        handles: Mapping[int, Awaitable[Pixels]] = NO_HANDLES,
    ) -> None:
        """Start requests, whose responses are fetched with `take`. With a goal they end once it is reached. `handles`
        are those of the pixels of their pictures, by digest."""
        async with self.entering, self._raised_by_take():
            pixels = dict(zip(handles, await asyncio.gather(*handles.values()), strict=True)) if handles else NO_PIXELS
            if not self.fixed:
                self._start(requests, pixels)
                return
            # The engine starts once it has all requests, in their order, so that it forms the same batches every time.
            await required(self.engine).hold()
            self._start(requests, pixels)
            await asyncio.sleep(0)  # each of them is queued, or rejected, before it first waits
            await required(self.engine).release(goal)

    async def interrupt(self) -> None:
        """End all requests: `take` returns their partial responses."""
        async with self.entering, self._raised_by_take():
            await required(self.engine).interrupt()

    async def take(self) -> list[tuple[Ticket, Completion | RequestFault]]:
        """Return the responses finished since the last call, at least one; waits for it. Raises if the engine died."""
        arrived = [await self.finished.get()]
        await asyncio.sleep(COALESCE_SECONDS)
        while not self.finished.empty():
            arrived.append(self.finished.get_nowait())
        finished: list[tuple[Ticket, Completion | RequestFault]] = []
        for ticket, result in arrived:
            if isinstance(result, Exception) and not isinstance(result, RequestFault):
                failure = RuntimeError(f"the engine failed: {type(result).__name__}: {result}")
                raise self._out_of_memory(result) or failure from result
            finished.append((ticket, result))
        return finished

    def _start(self, requests: Sequence[tuple[Ticket, Request]], pixels: Mapping[int, Pixels]) -> None:
        for ticket, request in requests:
            own = {digest: pixels[digest] for digest, _ in request.pictures}
            task = asyncio.create_task(self._generate(ticket, request, own))
            self.running.add(task)
            task.add_done_callback(self.running.discard)

    async def _generate(self, ticket: Ticket, request: Request, pixels: Mapping[int, Pixels]) -> None:
        async with self._raised_by_take(ticket):
            pictures = [pixels] if pixels else []  # an engine of another distribution may take none
            self.finished.put_nowait((ticket, await required(self.engine).generate(request, *pictures)))

    @asynccontextmanager
    async def _raised_by_take(self, ticket: Ticket = CONTROL) -> AsyncIterator[None]:
        """Pass an error of the engine to `take`: it returns the request's fault if the engine lives, else raises."""
        try:
            yield
        except RequestFault as fault:
            self.finished.put_nowait((ticket, fault))
        except Exception as error:  # an engine may raise anything
            fault = RejectedRequest(f"the engine failed on a request, {type(error).__name__}: {error}")
            lives = ticket != CONTROL and await self._lives()
            self.finished.put_nowait((ticket, fault if lives else error))

    async def _lives(self) -> bool:
        with suppress(Exception):
            await self.call("check")
            return True
        return False
