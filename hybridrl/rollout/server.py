"""A rollout server: an actor around one engine. Answers are asked for in one call, fetched in another as they finish.

Knows no engine: the one that was chosen is imported in the server's own process.
"""

import asyncio
import os
from importlib import import_module

from hybridrl.config.schema import ModelConfig, RolloutConfig
from hybridrl.rollout.types import Completion, Request, Sampling
from hybridrl.runtime.guard import begin_actor
from hybridrl.runtime.keeper import work_in_private
from hybridrl.weights.handles import Handle
from hybridrl.weights.layout import Bucket

ENGINES = {"vllm": ("hybridrl.rollout.vllm.engine", "VllmEngine")}

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    # vLLM's asynchronous engine is a child process in either case; 0 spares another one beside it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Engines that pin themselves to the first cores would fight for them.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # A token is many small products with Python between them: threads that slept then would be woken for each of them.
    # This is OpenMP's own patience; trainers, whose products are larger, have less.
    "GOMP_SPINCOUNT": "300000",
}

# A pause before finished answers are sent lets more come along: a call costs more than an answer.
COALESCE_SECONDS = 0.02


class RolloutServer:
    def __init__(self, log_file: str) -> None:
        begin_actor(log_file)
        work_in_private()  # an engine leaves its sockets behind, and itself where this process is killed
        self.finished: asyncio.Queue[Completion | Exception] = asyncio.Queue()
        self.running: set[asyncio.Task] = set()

    async def start(self, device: str, gpus: list[str], model: ModelConfig, rollout: RolloutConfig, slots: int) -> int:
        """Build the engine, whose weights are yet to come. Returns this process's id."""
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        module, engine = ENGINES[rollout.name]
        self.engine = vars(import_module(module))[engine](device, model, rollout, slots)
        self.fixed = rollout.full_determinism
        await self.engine.connect()
        return os.getpid()

    async def submit(self, requests: list[Request], sampling: Sampling) -> None:
        """Begin to answer; what is finished is fetched with `take`."""
        if self.fixed:
            return await self._submit_at_once(requests, sampling)
        for request in requests:
            self._begin(request, sampling)

    async def _submit_at_once(self, requests: list[Request], sampling: Sampling) -> None:
        """Let the engine begin when it has all requests, in their order: it forms the same batches each time."""
        try:
            await self.engine.hold()
            for count, request in enumerate(requests, start=1):
                task = self._begin(request, sampling)
                while self.engine.requests < count and not task.done():
                    await asyncio.sleep(0)
            await self.engine.release()
        except Exception as error:  # as where the engine is dead
            self.finished.put_nowait(error)

    def _begin(self, request: Request, sampling: Sampling) -> asyncio.Task:
        task = asyncio.create_task(self._answer(request, sampling))
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        return task

    async def take(self) -> list[Completion]:
        """The answers finished since the last call, one at least; waits for it. Raises if the engine died."""
        found = [await self.finished.get()]
        await asyncio.sleep(COALESCE_SECONDS)
        while not self.finished.empty():
            found.append(self.finished.get_nowait())
        for item in found:
            if isinstance(item, Exception):
                raise RuntimeError(f"the engine failed: {type(item).__name__}: {item}") from item
        return found

    async def _answer(self, request: Request, sampling: Sampling) -> None:
        try:
            self.finished.put_nowait(await self.engine.generate(request, sampling))
        except Exception as error:  # whatever ended an answer is the taker's to hear
            self.finished.put_nowait(error)

    async def score(self, token_ids: list[int]) -> list[float]:
        return await self.engine.score(token_ids)

    async def check(self) -> None:
        """Raises if the engine is dead."""
        await self.engine.check()

    async def sleep(self) -> None:
        await self.engine.sleep()

    async def wake(self, part: str) -> None:
        await self.engine.wake(part)

    async def begin_weights(self) -> None:
        await self.engine.begin_weights()

    async def load_bucket(self, bucket: Bucket, handles: list[Handle], digests: list[int], adapter: bool) -> None:
        await self.engine.load_bucket(bucket, handles, digests, adapter)

    async def finish_weights(self) -> None:
        await self.engine.finish_weights()

    async def finish_hand_over(self, number: int) -> None:
        await self.engine.finish_hand_over(number)

    async def held(self) -> int:
        """The number of the hand-over whose weights the engine computes with."""
        return self.engine.number
