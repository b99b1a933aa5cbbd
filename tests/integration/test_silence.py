"""Real ranks, servers and engines that are stopped: they are named with the place where they are, and replaced where
they can be."""

import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hybridrl.core.cluster import group
from hybridrl.core.rollout import client
from tests.integration.answers import generate, largest_gap, requests, rows, tokens

pytestmark = pytest.mark.drill
STOPPED_SECONDS = 6.0
LIMIT = 10.0
ENDS_SECONDS = 20.0  # Ray kills a process that does not respond after 5 s, when a new one may have started already


@pytest.fixture(autouse=True)
def soon(monkeypatch, parts, watched) -> None:
    """Report after a second."""
    watched(silent=1.0, poll=0.2)
    parts[0].client.silent_seconds, parts[0].client.look_seconds = 1.0, 0.2
    monkeypatch.setattr(client, "CHECK_SECONDS", 0.5)


@pytest.fixture
def stopped() -> Iterator[list[psutil.Process]]:
    """Processes to continue in the end."""
    processes: list[psutil.Process] = []
    yield processes
    for process in processes:
        if process.is_running():
            process.resume()


def process_of(log: str) -> psutil.Process:
    """The actor that writes to a log."""
    writers = [process for process in psutil.Process().children(recursive=True) if writes_to(process, log)]
    return next(process for process in writers if "ray::" in process.cmdline()[0])


def writes_to(process: psutil.Process, log: str) -> bool:
    try:
        return os.readlink(f"/proc/{process.pid}/fd/2") == log
    except OSError:
        return False


def stop_for_some_seconds(process: psutil.Process) -> None:
    process.suspend()
    threading.Timer(STOPPED_SECONDS, process.resume).start()


def test_a_stopped_rank_and_the_ranks_that_wait_for_it_are_named(parts, capsys):
    engine, workers = parts
    wanted = requests()
    engine.to_rollout(0)
    batch = rows(wanted, generate(engine, wanted))
    engine.to_training()
    group.durations.clear()
    capsys.readouterr()
    stop_for_some_seconds(process_of(engine.ranks.logs[1]))
    assert largest_gap(workers, batch) < 1e-4, "nothing is lost"
    report = capsys.readouterr().out.split("train worker.log_probs: 2 not done after")[1]
    first, second = report.splitlines()[1:3]
    assert re.search(r"^  train-0: ray::TrainWorker.* \(pid \d+\) in \w+ \(\w+\.py:\d+", first)
    assert re.search(
        r"^  train-1: ray::TrainWorker.* \(pid \d+\) stopped \(state T.*\); its log: /.*/train-1\.log$", second
    )
    assert re.search(r"^Thread \w+ MainThread ", Path(engine.ranks.logs[0]).read_text(), re.MULTILINE)


def test_a_stopped_server_is_named_while_it_should_generate(parts, capsys):
    engine, _ = parts
    engine.to_rollout(0)
    wanted = requests()
    undisturbed = tokens(generate(engine, wanted))
    capsys.readouterr()
    process = process_of(engine.fleet.servers.logs[0])
    stop_for_some_seconds(process)
    assert tokens(generate(engine, wanted)) == undisturbed
    report, *others = [line for line in capsys.readouterr().out.splitlines() if "has sampled no token" in line]
    assert "rollout server 0" in report
    assert f"(pid {process.pid}) stopped (state T" in report
    assert not any("rollout server 1" in line for line in others)
    assert engine.client.restarts == 0
    engine.to_training()


@pytest.mark.parametrize("call", ["wake", "load_bucket", "sleep"])
def test_a_server_that_does_not_finish_a_call_is_replaced_within_its_limit(parts, monkeypatch, caplog, stopped, call):
    engine, workers = parts
    wanted, restarts, log = requests(), engine.client.restarts, engine.fleet.servers.logs[0]
    stopped += [process_of(log)]
    owner = engine.sync if call == "load_bucket" else engine.fleet
    monkeypatch.setattr(owner, "timeout", LIMIT)
    if call == "sleep":
        engine.to_rollout(3)
        stopped[0].suspend()
    else:
        name = {"wake": "wake", "load_bucket": "send"}[call]
        plain, waiting = getattr(owner, name), list(stopped)

        def stop_and_call(*arguments, **options):
            while waiting:
                waiting.pop().suspend()
            plain(*arguments, **options)

        monkeypatch.setattr(owner, name, stop_and_call)
    caplog.clear()
    engine.to_training()
    engine.to_rollout(4)
    responses = generate(engine, wanted)
    engine.to_training()
    assert largest_gap(workers, rows(wanted, responses)) < 1e-4
    assert engine.client.restarts == restarts + 1
    until = time.monotonic() + ENDS_SECONDS
    while stopped[0].is_running() and stopped[0].status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.1)
    if call != "sleep":
        about = r" \(bucket 1 of \d+: .*\)" if call == "load_bucket" else ""
        message = rf"the weight sync failed, and is repeated: rollout server\.{call}{about}: no response from rollout-0"
        (failed,) = (line for line in caplog.messages if re.match(message, line))
        assert f"(pid {stopped[0].pid}) stopped (state T" in failed
