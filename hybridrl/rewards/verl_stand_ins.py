"""What reward files import from verl besides graders: decorators, and classes to inherit from or to annotate."""

import asyncio
import functools
import signal
import threading
from collections.abc import Callable
from typing import Any


@functools.cache
def stand_in(name: str) -> type:
    """A class under the name of a verl class, which can be inherited from but not instantiated."""

    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{name} is a class of verl, which is not installed; only reward functions run here")

    return type(name.rpartition(".")[2], (), {"__init__": refuse, "__module__": name.rpartition(".")[0]})


def unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def leaves_unchanged(*_: Any, **__: Any) -> Callable[..., Any]:
    """A decorator with arguments that changes nothing."""
    return unchanged


def get_event_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_event_loop()
    except RuntimeError:  # not in the main thread
        asyncio.set_event_loop(asyncio.new_event_loop())
        return asyncio.get_event_loop()


def timeout_limit(seconds: float, use_signals: bool = False) -> Callable[..., Any]:
    """TimeoutError after so many seconds in the main thread; elsewhere reward.timeout alone holds."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def limited(*arguments: Any, **named: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return function(*arguments, **named)
            before = signal.signal(signal.SIGALRM, _out_of_time)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                return function(*arguments, **named)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)

        return limited

    return decorate


def _out_of_time(*_: Any) -> None:
    raise TimeoutError("the function took longer than its timeout_limit")
