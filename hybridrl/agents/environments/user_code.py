"""The user's environments, tools and agents. Calls are contained: nothing they do can end or hold up other episodes,
and their results are checked on arrival. Imports nothing heavy, since the processes of functions import it."""

import asyncio
import contextlib
import importlib
import inspect
import json
import logging
import math
import reprlib
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any
from urllib.error import URLError

from hybridrl.agents.environments import EpisodeFault, ToolError
from hybridrl.config.custom_code import EndingForks, text_of, where
from hybridrl.config.findings import ConfigError
from hybridrl.rewards.score import OutOfTime, Score, as_number, as_score

logger = logging.getLogger(__name__)

# Exceptions of HTTP clients if nobody is at the other end; some do not derive from ConnectionError.
UNREACHABLE = ("ConnectError", "ConnectionError", "ConnectTimeout", "ReadTimeout", "ReadError", "RemoteProtocolError")
ENDS_TASKS = (asyncio.CancelledError, GeneratorExit)
ON_PURPOSE = (ToolError, EpisodeFault, OutOfTime, ConfigError)
_warned: set[str] = set()  # names with a warning about their metrics in this process


class UserCodeError(Exception):
    """An exception of the user's code, which is `cause`: with its line, and what it was called with. An exit, which
    would end the event loop, is a RuntimeError."""

    def __init__(self, error: BaseException, what: Any, arguments: tuple[Any, ...] = ()) -> None:
        ordinary = isinstance(error, Exception) and not isinstance(error, StopIteration)
        self.cause = error if ordinary else RuntimeError(f"{type(error).__name__}: {text_of(error)}")
        self.fault = f"raised:{type(self.cause).__name__}"
        call = f"({', '.join(map(reprlib.repr, arguments))})" if arguments else ""
        super().__init__(f"{where(self.cause.with_traceback(error.__traceback__), '')} in {name_of(what)}{call}")


@contextlib.contextmanager
def contained(
    what: Any, *passing: type[Exception], arguments: tuple[Any, ...] = (), interrupts: bool = False
) -> Iterator[None]:
    """Raise UserCodeError in place of whatever the code within raises, except `passing`, one that is raised already,
    and the end of the task that it runs in. KeyboardInterrupt is the user's, at the terminal, unless `interrupts`. What
    the code has forked ends here."""
    try:
        with EndingForks():
            yield
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt) and not interrupts
        if stopped or isinstance(error, (*passing, UserCodeError, *ENDS_TASKS)):
            raise
        raise UserCodeError(error, what, arguments) from error


async def finished(function: Callable[..., Any], *arguments: Any, seconds: float | None = None) -> Any:
    """Await a coroutine function, or run a plain one in a thread, which is abandoned at the time limit.

    OutOfTime after `seconds`; UserCodeError for whatever the function raises but ON_PURPOSE.
    """
    task = asyncio.ensure_future(_called(function, arguments))
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            raise OutOfTime(f"time limit of {seconds:g} s reached")
        error = asyncio.CancelledError("it cancelled itself") if task.cancelled() else task.exception()
        if isinstance(error, ENDS_TASKS):  # from the function: this task has not ended
            raise UserCodeError(error, function, arguments)
        return task.result()
    finally:  # also if this is cancelled
        task.cancel()


async def _called(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    with contained(function, *ON_PURPOSE, arguments=arguments, interrupts=True):
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        returned = await _in_thread(function, arguments)
        return await returned if inspect.isawaitable(returned) else returned


def _in_thread(function: Callable[..., Any], arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)

    def work() -> None:
        result, fault = None, None
        try:
            with contained(function, *ON_PURPOSE, arguments=arguments, interrupts=True):
                result = function(*arguments)
        except (UserCodeError, *ON_PURPOSE) as error:
            fault = error
        except ENDS_TASKS as error:  # from the function: nothing ends a thread
            fault = UserCodeError(error, function, arguments)
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


def unreachable(error: BaseException) -> bool:
    """Whether an exception means that something outside cannot be reached or is broken, such as HTTP 5xx."""
    answer = getattr(error, "response", None)
    status = getattr(answer, "status_code", None) or getattr(error, "code", None)
    if isinstance(status, int):
        return 500 <= status < 600 or status == 429
    kinds = {cls.__name__ for cls in type(error).__mro__}
    return isinstance(error, ConnectionError | socket.gaierror | URLError) or not kinds.isdisjoint(UNREACHABLE)


def name_of(source: Any) -> str:
    """Return the name of a class, of that of an object, or of a function, with its file; a text is a name itself."""
    while isinstance(source, partial):
        source = source.func
    if isinstance(source, str):
        return source
    source = source if hasattr(source, "__qualname__") else type(source)
    file = getattr(sys.modules.get(getattr(source, "__module__", None) or ""), "__file__", None)
    return f"{source.__qualname__} ({file})" if file else source.__qualname__


@dataclass(frozen=True)
class ToolResult:
    """The result of a call: the text for the policy, a reward of this call for the reward function, metrics, and
    pictures for the policy, in the forms that rows have them in, or PIL's."""

    text: str = ""
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    images: Sequence[Any] = ()


def reward_of(value: Any, source: Any) -> float | None:
    """Return the reward that an object, class or function gave; None stays None.

    EpisodeFault, by the rules of reward functions, if it is not a finite number.
    """
    if value is None:
        return None
    try:
        with contained(source):  # the value's __float__, such as that of a tensor of several numbers
            score = as_score(value)
    except UserCodeError as error:
        score = Score(None, detail=f"returned a {type(value).__name__} ({error.cause})")
    if score.value is None:
        raise EpisodeFault(f"the reward of {name_of(source)} is not a finite number: it {score.detail}")
    return score.value


def metrics_of(values: Any, source: Any) -> dict[str, float]:
    """Return the finite numbers among the metrics that an object, class or function gave, with a warning about the
    first other one."""
    if values is None:
        return {}
    numbers = {str(name): _finite(value) for name, value in values.items()} if isinstance(values, Mapping) else {}
    metrics = {name: value for name, value in numbers.items() if value is not None}
    name, others = name_of(source), [name for name in numbers if name not in metrics]
    if (others or not isinstance(values, Mapping)) and name not in _warned:
        _warned.add(name)
        what = ", ".join(others) if others else f"which are a {type(values).__name__}, not a dict"
        logger.warning("metrics of %s that are not finite numbers are left out: %s", name, what)
    return metrics


def _finite(value: Any) -> float | None:
    with contextlib.suppress(UserCodeError), contained("a metric"):  # its __float__
        number = as_number(value)
        return number if number is not None and math.isfinite(number) else None
    return None


def to_result(returned: Any, source: Any = "the tool") -> ToolResult:
    """Read what a tool returned, its pictures as they cross processes; ToolError if it is neither text nor pictures,
    EpisodeFault if its reward is not a finite number."""
    reward, metrics = None, {}
    if isinstance(returned, ToolResult):
        reward, metrics = returned.reward, returned.metrics
    elif isinstance(returned, tuple) and 1 <= len(returned) <= 3:
        returned, reward, metrics = (*returned, None, None)[:3]
    text, images = _text(returned), _images(returned)
    return ToolResult(text, reward_of(reward, source), metrics_of(metrics, source), images)


def _images(value: Any) -> list[Any]:
    """The pictures in what a tool returned: in verl's ToolResponse, in a ToolResult, or PIL's alone."""
    of_verl, ours = getattr(value, "image", None), getattr(value, "images", None)
    images = value if _is_picture(value) else ours if of_verl is None else of_verl
    images = [] if images is None else images if isinstance(images, list | tuple) else [images]
    if not images:
        return []
    data = importlib.import_module("hybridrl.data.pictures")  # takes longer than most tools
    try:
        return [data.as_stored(image) for image in images]
    except data.PictureFault as fault:
        raise ToolError(f"the tool returned a picture, and it cannot be read: {fault}") from fault


def _is_picture(value: Any) -> bool:
    return hasattr(value, "getbands") and hasattr(value, "tobytes")  # PIL's


def _text(value: Any) -> str:
    """The text that the policy reads."""
    if isinstance(value, str):
        return value
    if getattr(value, "video", None):
        raise ToolError("the tool returned a video, which models cannot read here")
    if _is_picture(value):
        return ""
    if hasattr(value, "text"):  # a ToolResult, or verl's ToolResponse
        return _text(value.text)
    if isinstance(value, bytes | bytearray):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            raise ToolError(f"the tool returned {len(value)} bytes that are not text") from None
    if value is None:
        return ""
    kind = type(value)
    if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:
        raise ToolError(f"the tool returned a {kind.__name__}, which is not text")
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)
