"""vLLM's engine in a thread, which runs one iteration after another while there are requests."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

    from hybridrl.core.rollout.vllm.collector import EngineResponse

T = TypeVar("T")


class EngineLoop:
    """An engine that coroutines use: requests, and calls of its methods, enter between two iterations.

    `build` makes the engine in the thread in which it computes: OpenMP's threads belong to the one that starts them.
    """

    def __init__(self, build: Callable[[], "LLMEngine"]) -> None:
        self.build = build
        self.engine: LLMEngine | None = None
        self.calls: SimpleQueue[tuple[Callable[[LLMEngine], Any], Future]] = SimpleQueue()
        self.responses: dict[str, Future[EngineResponse]] = {}  # of unfinished requests, by name
        self.held: list[Callable[[LLMEngine], Any]] | None = None  # requests that wait for `release`
        # Called with each response that finished: whether to interrupt the others.
        self.enough: Callable[[EngineResponse], bool] | None = None
        self.failure: Exception | None = None
        self.thread = Thread(target=self._run, name="engine", daemon=True)

    async def start(self) -> None:
        """Build the engine; raises what it raises."""
        self.thread.start()
        await self.call(lambda engine: None)

    async def call(self, function: Callable[["LLMEngine"], T]) -> T:
        """Call a function with the engine, between two iterations."""
        return await asyncio.wrap_future(self._submit(function))

    async def generate(self, name: str, *request: Any, **options: Any) -> "EngineResponse":
        """Return the response to a request, whose arguments are those of LLMEngine.add_request."""
        self.responses[name] = response = _future()
        response.add_done_callback(lambda _: self.responses.pop(name, None))

        def add(engine: "LLMEngine") -> None:
            with _raised_by(response):
                engine.add_request(name, *request, **options)

        if self.held is None:
            self._submit(add)
        else:
            self.held.append(add)
        return await asyncio.wrap_future(response)

    def hold(self) -> None:
        """Keep requests from the engine until `release`."""
        self.held = []

    def release(self) -> None:
        """Give the engine all requests before its next iteration, in their order."""
        held, self.held = self.held or [], None
        self._submit(lambda engine: [add(engine) for add in held])

    async def interrupt(self) -> None:
        """End all requests between two iterations: their responses have the tokens so far."""
        await self.call(self._interrupt)

    def _interrupt(self, engine: "LLMEngine") -> None:
        interrupted = engine.output_processor.interrupt()
        engine.engine_core.abort_requests(list(interrupted))
        engine.logger_manager.pause()
        for response in interrupted.values():
            self.responses[response.name].set_result(response)

    def check(self) -> None:
        """Raise if the engine is dead. Any thread may ask."""
        if self.failure is not None or getattr(self.engine and self.engine.model_executor, "is_failed", False):
            raise RuntimeError(f"the engine is dead: {self.failure or 'a process of its devices ended'}")

    def _submit(self, function: Callable[["LLMEngine"], T]) -> Future[T]:
        result = _future()
        self.calls.put((function, result))
        if self.failure is not None:  # the thread may have ended before
            self._fail(self.failure)
        return result

    def _run(self) -> None:
        try:
            self.engine = engine = self.build()
            while True:
                self._make_calls(engine)
                finished = engine.step() if engine.has_unfinished_requests() else ()
                for response in finished:
                    self.responses[response.name].set_result(response)
                if self.enough is not None and any([self.enough(response) for response in finished]):
                    self._interrupt(engine)
        except BaseException as error:  # whatever ends the thread, all that waits for it must end
            self.failure = _as_exception(error)
            self._fail(self.failure)

    def _make_calls(self, engine: "LLMEngine") -> None:
        """Make all calls that wait; waits for one if the engine has nothing else to do."""
        with suppress(Empty):
            while True:
                function, result = self.calls.get(block=not engine.has_unfinished_requests())
                with _raised_by(result):
                    result.set_result(function(engine))

    def _fail(self, error: Exception) -> None:
        """End everything that waits for the engine."""
        with suppress(Empty):
            while True:
                self.calls.get_nowait()[1].set_exception(error)
        for name in list(self.responses):
            if response := self.responses.pop(name, None):
                response.set_exception(error)


def _as_exception(error: BaseException) -> Exception:
    """Return what ended a thread, such as the panic of a library in Rust, as an error that coroutines catch."""
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


@contextmanager
def _raised_by(result: Future) -> Iterator[None]:
    """Have a future raise what the block raises; what is no Exception ends the thread as well."""
    try:
        yield
    except BaseException as error:  # vLLM may raise anything, and a library in Rust may panic
        result.set_exception(_as_exception(error))
        if not isinstance(error, Exception):
            raise


def _future() -> Future:
    """A future that a caller who no longer waits cannot cancel: the thread will set it."""
    future: Future = Future()
    future.set_running_or_notify_cancel()
    return future
