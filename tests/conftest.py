"""Rows to test with, property tests that draw the same examples every time, and which tests go together."""

import asyncio
import inspect
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from io import StringIO

import pytest
import torch
from hypothesis import settings
from rich.console import Console
from torch import Tensor

from hybridrl.config import files
from hybridrl.core.batch import Batch
from hybridrl.runtime import guard
from hybridrl.runtime.keeper import started_with
from hybridrl.tracking.sink import Activity

# A shell ignores SIGINT in what it starts in the background, and so would all processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests send it, and what they start inherits that it is ignored where the suite was started by nohup.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
settings.register_profile("hybridrl", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("hybridrl")
torch.set_num_threads(1)  # of tiny tensors, whose threads would only wait for one another where other tests run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest goes first, where several processes share the files (scripts/test.sh)."""
    items.sort(key=lambda item: "integration" in item.path.parts, reverse=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine has an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(autouse=True)
def nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink that one test leaves open sees nothing of the next one's phases: the watcher is the whole process's."""
    monkeypatch.setattr(Activity, "watcher", None)


@pytest.fixture(autouse=True)
def names_of_the_hub_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the machine of the tests has a network or not."""
    monkeypatch.setattr(files, "hub_is_away", lambda: False)


@pytest.fixture
def no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request to stop was received, so that a test may send one: two within a second count as one."""
    monkeypatch.setattr(guard.REQUESTS, "last", "")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Look at calls of actors every `poll` seconds, and report those that are silent for longer than `silent`."""

    def set_seconds(*, silent: float, poll: float) -> None:
        monkeypatch.setattr("hybridrl.core.cluster.group.SILENT_SECONDS", silent)
        monkeypatch.setattr("hybridrl.core.cluster.group.POLL_SECONDS", poll)

    return set_seconds


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Give this process a number of cores."""
    return lambda count: monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))


@pytest.fixture
def vanishing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have processes end before their files in /proc are looked at: those whose paths end like this."""

    def set_ends(*ends: str) -> None:
        def ended(stat: Callable, path: object, *arguments: object, **options: object) -> os.stat_result:
            if str(path).startswith("/proc/") and str(path).endswith(ends):
                raise ProcessLookupError(path)
            return stat(path, *arguments, **options)

        monkeypatch.setattr(os, "stat", partial(ended, os.stat))

    return set_ends


@pytest.fixture
def free_space(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have every disk say that so many bytes are free, or what `places` names for its directory."""
    usage = shutil.disk_usage("/")

    def limit(free: int, places: Mapping[str, int] | None = None) -> None:
        of = places or {}
        monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=of.get(str(place), free)))

    return limit


class Screen(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A terminal that receives the printed text in place of this process's output."""
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    monkeypatch.setattr("hybridrl.tracking.console.console", Console(file=screen, width=100))
    return screen


MakeBatch = Callable[..., Batch]


@pytest.fixture(scope="session")
def make_batch() -> MakeBatch:
    """Rows with answers of the lengths given; prompt ids count up from 100, response ids from 0.

    Every prompt has two tokens and every row is its own group, unless said; further fields by name, as plain lists.
    """

    def make(
        answers: Sequence[int],
        *,
        prompts: Sequence[int] | None = None,
        group: Sequence[int] | None = None,
        carried: dict[str, Tensor] | None = None,
        **more: object,
    ) -> Batch:
        rows = range(len(answers))
        prompts = [2 for _ in rows] if prompts is None else prompts
        fields = {name: _tensor(value) for name, value in more.items()}
        fields.setdefault("response_mask", torch.ones(sum(answers), dtype=torch.bool))
        return Batch(
            prompt_lengths=torch.tensor(prompts, dtype=torch.int64),
            response_lengths=torch.tensor(answers, dtype=torch.int64),
            prompt_ids=100 + torch.arange(sum(prompts)),
            response_ids=torch.arange(sum(answers)),
            group=torch.tensor(list(rows) if group is None else group, dtype=torch.int64),
            position=torch.tensor(list(rows), dtype=torch.int64),
            sample=torch.zeros(len(rows), dtype=torch.int64),
            carried=carried or {},
            **fields,
        )

    return make


def _tensor(value: object) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value)


@pytest.fixture
def full_disk() -> Iterator[Callable[[int | None], None]]:
    """Limit the size of files in bytes; None removes the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))

    yield limit
    limit(None)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Return the living processes that this test has started, in whatever session."""
    monkeypatch.setenv("STARTED_BY", name := f"test-{os.getpid()}-{time.monotonic()}")
    return lambda: [*started_with(f"STARTED_BY={name}")]  # a process that has ended has no environment
