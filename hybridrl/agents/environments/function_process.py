"""The user's plain functions as tools, in processes that are killed at the time limit of a call.

A thread cannot be ended, and long integers and regular expressions hold up all others of its process. Each process
imports the file of the functions and runs one call at a time; it is used again, so a call costs a message each way.
"""

import asyncio
import importlib
import inspect
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from hybridrl.agents.environments import EpisodeFault, ToolError
from hybridrl.agents.environments.user_code import ToolResult, UserCodeError, contained, to_result, unreachable
from hybridrl.config import ConfigError
from hybridrl.config.custom_code import load_module
from hybridrl.rewards.program import NoMessage, Program, messages_of
from hybridrl.rewards.score import OutOfTime

KEY = "actor_rollout_ref.rollout.multi_turn.function_tool_path"
SECONDS_TO_LOAD = 300.0  # to import the file
MOST = 16  # processes for a file
SECONDS_BEFORE_ANOTHER = 0.2  # until a call stops waiting for a busy process


class FunctionProcesses:
    """The processes for one file, started as calls need them. `call` may be used from any thread."""

    def __init__(self, path: str, libraries: Sequence[str], seconds: float) -> None:
        self._path, self._libraries, self._seconds = path, tuple(libraries), seconds
        self._idle: list[_Process] = []
        self._count, self._changed = 0, threading.Condition()

    def call(self, name: str, arguments: dict[str, Any], seconds: float | None = None) -> ToolResult:
        """Return the result of a function of the file, or raise its exception. OutOfTime: its process was killed."""
        process, reply = self._take(), None
        try:
            process = process or _Process(self._path, self._libraries)
            reply = process.ask((name, arguments), seconds or self._seconds)
        finally:
            if process and reply is None:
                process.kill()
                process = None
            with self._changed:
                self._idle += [process] if process else []
                self._count -= not process
                self._changed.notify()
        kind, text, *details = reply
        if not kind:
            return ToolResult(text, *details)
        trace, outside = details
        if kind in (ToolError.__name__, EpisodeFault.__name__):
            raise (ToolError if kind == ToolError.__name__ else EpisodeFault)(text)
        error = type(kind, (ConnectionError if outside else Exception,), {})(text)
        error.add_note(trace)
        raise error

    def _take(self) -> "_Process | None":
        """Return a process that waits for a call; None: one more is to be started."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle, SECONDS_BEFORE_ANOTHER if self._count else 0)
            if not self._idle and self._count == MOST:
                self._changed.wait_for(lambda: self._idle or self._count < MOST)
            while self._idle:
                process = self._idle.pop()
                if process.alive:
                    return process
                process.kill()  # it was killed from outside: frees its socket
                self._count -= 1
            self._count += 1
            return None


class _Process:
    """One process; it ends when its socket is closed."""

    def __init__(self, path: str, libraries: Sequence[str]) -> None:
        self._program, self._setup = Program(__name__, sys.path), (path, libraries)  # until the file is imported
        self._messages = self._program.messages

    @property
    def alive(self) -> bool:
        return self._program.process.poll() is None

    def ask(self, call: tuple[str, dict[str, Any]], seconds: float) -> Any:
        """Return the reply to a call, whose time begins once the file is imported."""
        if self._setup:
            self._load(*self._setup)
            self._setup = None
        try:
            self._messages.send(call, seconds)
            return self._messages.receive(seconds)
        except TimeoutError:
            raise OutOfTime(f"time limit of {seconds:g} s reached") from None
        except NoMessage as error:
            raise RuntimeError(f"what the tool's process sent is not its next result ({error})") from None
        except (EOFError, OSError):
            raise RuntimeError(f"the tool's process {self.kill()}") from None

    def _load(self, path: str, libraries: Sequence[str]) -> None:
        try:
            self._messages.send((path, libraries))
            reason = self._messages.receive(SECONDS_TO_LOAD)
        except TimeoutError:
            reason = f"{KEY}={path} was not imported within {SECONDS_TO_LOAD:g} s"
        except (NoMessage, EOFError, OSError):
            reason = f"the process that imports {KEY}={path} {self.kill()}"
        if reason:
            raise EpisodeFault(reason)

    def kill(self) -> str:
        """Kill the process with all that it started; return how it ended."""
        self._messages.close()
        code = self._program.kill(0.1)  # seconds to end by itself
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def main(descriptor: int, parent: int) -> None:
    """Import the file that the first message names, and run the function of each further message."""
    messages = messages_of(descriptor, parent)
    path, libraries = messages.receive()
    try:
        members = vars(_load(path, libraries))
    except ConfigError as error:
        messages.send(str(error))
        return
    messages.send("")
    with suppress(EOFError):
        while True:
            name, arguments = messages.receive()
            messages.send(_reply(members[name], name, arguments))


def _load(path: str, libraries: tuple[str, ...]) -> ModuleType:
    """Return the file's module; only some need verl's names, whose import takes ten times as long as all else here."""
    if not libraries:
        with suppress(ConfigError):
            return load_module(path, KEY)
    importlib.import_module("hybridrl.agents.environments.load").provide_libraries(libraries)
    return load_module(path, KEY)


def _reply(function: Any, name: str, arguments: dict[str, Any]) -> Any:
    try:
        with contained(function, interrupts=True):
            returned = function(**arguments)
            if inspect.isawaitable(returned):
                returned = asyncio.run(_awaited(returned))
            result = to_result(returned, f"the tool {name}")
            return (
                "",
                result.text,
                result.reward,
                dict(result.metrics),
                result.images,
            )  # plain values, as all that is sent
    except UserCodeError as failure:
        error = failure.cause
        kinds = [kind.__name__ for kind in (ToolError, EpisodeFault) if isinstance(error, kind)]
        kind, trace = [*kinds, type(error).__name__][0], "".join(traceback.format_exception(error))
        return kind, str(error), trace, unreachable(error)


async def _awaited(returned: Any) -> Any:
    return await returned
