"""Whatever the user's code raises, an episode's call of it ends with one error, with the line and the arguments."""

import asyncio
import os
import sys
from collections.abc import Callable
from functools import partial

import pytest

from hybridrl.agents.environments import EpisodeFault, ToolError
from hybridrl.agents.environments.user_code import UserCodeError, contained, finished


class Mute(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise KeyError("no text")


HOSTILE = [
    Mute("no"),
    ValueError("no"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"),
    RecursionError("no"),
    MemoryError("no"),
    StopIteration("no"),
    SystemExit("no"),
    KeyboardInterrupt("no"),
    GeneratorExit("no"),
    asyncio.CancelledError("no"),
    BaseExceptionGroup("no", [SystemExit(3)]),
]


def plain(error: BaseException) -> None:
    raise error


async def coroutine(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("function", [plain, coroutine])
@pytest.mark.parametrize("error", HOSTILE, ids=lambda error: type(error).__name__)
def test_whatever_is_raised_is_one_error_and_ends_neither_loop_nor_thread(function, error) -> None:
    async def run() -> UserCodeError:
        with pytest.raises(UserCodeError) as caught:
            await asyncio.wait_for(finished(function, error), 20)
        return caught.value

    failed = asyncio.run(run())
    assert isinstance(failed.cause, Exception) and failed.fault == f"raised:{type(failed.cause).__name__}"


def forking(end: Callable[[], object]) -> int:
    """Return the process that ends so, in the process that has forked it."""
    return os.fork() or end()


async def in_coroutine(end: Callable[[], object]) -> int:
    return forking(end)


@pytest.mark.parametrize("function", [forking, in_coroutine])
@pytest.mark.parametrize(("end", "status"), [(partial(sys.exit, 3), 3), (partial(int, "x"), 1), (int, 0)])
async def test_what_code_has_forked_ends_as_a_script_and_never_returns(function, end, status) -> None:
    assert os.waitstatus_to_exitcode(os.waitpid(await finished(function, end), 0)[1]) == status


def test_the_error_has_the_line_and_what_the_function_was_called_with() -> None:
    with pytest.raises(UserCodeError) as caught:
        asyncio.run(finished(plain, KeyError("target")))
    text = str(caught.value)
    assert text.startswith("KeyError: 'target' (") and "test_user_code.py:" in text
    assert "in plain (" in text and text.endswith("(KeyError('target'))")
    assert caught.value.fault == "raised:KeyError"


@pytest.mark.parametrize("error", [ToolError("locked"), EpisodeFault("away")])
async def test_what_is_raised_on_purpose_stays_what_it_is(error) -> None:
    with pytest.raises(type(error), match=str(error)):
        await finished(plain, error)


async def test_a_function_without_a_module_raises_as_others_do() -> None:
    with pytest.raises(UserCodeError, match=r"TypeError: .* in str.upper"):
        await finished(str.upper, 3)


def test_ctrl_c_passes_where_the_user_waits_at_the_terminal() -> None:
    with pytest.raises(KeyboardInterrupt), contained("the environment's constructor"):
        raise KeyboardInterrupt
