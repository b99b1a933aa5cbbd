"""Calling the user's functions from an event loop, so that nothing they do can end or hold up other episodes."""

import asyncio
import contextlib
import inspect
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from queue import SimpleQueue
from typing import Any

from hybridrl.rewards.score import OutOfTime


async def finished(function: Callable[..., Any], *arguments: Any, seconds: float | None = None) -> Any:
    """Await a coroutine function, or run a plain one in a thread, which is abandoned at the time limit.

    OutOfTime after `seconds`. An exit of the called code is a RuntimeError here.
    """
    task = asyncio.ensure_future(_contained(_called(function, arguments)))
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            raise OutOfTime(f"time limit of {seconds:g} s reached")
        return task.result()
    finally:  # also if this is cancelled
        task.cancel()


async def _called(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    returned = await _in_thread(function, arguments)
    return await returned if inspect.isawaitable(returned) else returned


async def _contained(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except (SystemExit, KeyboardInterrupt, StopIteration) as error:  # they would end the event loop, or hang the task
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _in_thread(function: Callable[..., Any], arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)

    def work() -> None:
        result, fault = None, None
        try:
            result = function(*arguments)
        except Exception as error:
            fault = RuntimeError(f"StopIteration: {error}") if isinstance(error, StopIteration) else error
        except BaseException as error:
            fault = RuntimeError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, fault)

    try:
        _idle.pop().put(work)
    except IndexError:
        threading.Thread(target=_work_off, args=(work,), daemon=True, name="user code").start()
    return future


# Threads that wait for work, by their queues. There is no limit, and they are daemons: a call that hangs must hold up
# neither others nor the end of the process. A thread is used again, since starting one takes longer than most calls.
_idle: deque[SimpleQueue[Callable[[], None]]] = deque()


def _work_off(work: Callable[[], None]) -> None:
    queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
    while True:
        work()
        _idle.append(queue)
        work = queue.get()
