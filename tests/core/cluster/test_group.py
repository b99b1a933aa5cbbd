"""Calls of a group without Ray: results, deadlines, and which of several failures is raised."""

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from hybridrl.core.cluster import group as module
from hybridrl.core.cluster.failures import cause
from hybridrl.core.cluster.group import (
    START_LIMIT,
    Group,
    OutOfMemory,
    RemoteFailure,
    WorkerDied,
    control_limit,
    gather,
    wait,
)
from hybridrl.runtime import stacks
from hybridrl.tracking.faults import read_faults, recording


@dataclass(eq=False)
class Call:
    """Stands in for a pending call: it succeeds, fails, or never responds."""

    result: Any = None
    error: Exception | None = None
    responds: bool = True


@dataclass
class FakeRay:
    """Stands in for Ray: calls respond in the order in which they were started."""

    runtime_env: dict[str, Any] = field(default_factory=dict)

    def wait(self, refs: Sequence[Call], num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        ready = [ref for ref in refs if ref.responds][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: Call) -> Any:
        if ref.error:
            raise ref.error
        return ref.result

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(runtime_env=self.runtime_env)

    def kill(self, actor: object) -> None: ...


def replace_ray(patch: pytest.MonkeyPatch, stand_in: FakeRay, lost: str | None = None) -> None:
    """Have groups call a stand-in for Ray, which has lost a component or none; every process is in a collective."""
    patch.setattr(module, "ray", stand_in)
    patch.setattr(module, "lost_component", lambda: lost)
    patch.setattr(module, "activities", lambda logs: {log: f"in all_reduce ({log})" for log in logs})


class Worker:
    """Stands in for an actor: its method returns the call, which results in its own value and the arguments."""

    def __init__(self, call: Call) -> None:
        def remote(*arguments: Any) -> Call:
            call.result = (call.result, *arguments)
            return call

        self.work = SimpleNamespace(remote=remote)


def work() -> None:
    """Names the method that the groups call."""


def workers(*calls: Call, logs: Sequence[str] = ()) -> Group:
    return Group([Worker(call) for call in calls], "train worker", logs)


def task_error(message: str) -> RayTaskError:
    traceback = f'\x1b[36mray::Worker.work()\x1b[39m\n  File "worker.py", line 3, in work\nValueError: {message}'
    return RayTaskError("work", traceback, ValueError(message))


class Died(RayActorError):
    """An actor's death with Ray's message."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __str__(self) -> str:
        return self.message


@pytest.fixture(autouse=True)
def ray(monkeypatch, watched) -> FakeRay:
    stand_in = FakeRay()
    replace_ray(monkeypatch, stand_in)
    watched(silent=module.SILENT_SECONDS, poll=0.01)
    module.durations.clear()
    return stand_in


def test_results_are_in_rank_order():
    assert workers(Call("a"), Call("b")).broadcast(work, 1, timeout=1) == [("a", 1), ("b", 1)]
    assert workers(Call("a"), Call("b")).scatter(work, [(1,), (2, 3)], timeout=1) == [("a", 1), ("b", 2, 3)]


def test_every_actor_needs_its_arguments():
    with pytest.raises(ValueError, match="argument"):
        workers(Call(), Call()).scatter(work, [(1,)], timeout=1)


@pytest.mark.parametrize("further", [[], ["  no model", "see the log"]], ids=["one line", "several lines"])
def test_a_failure_names_role_method_and_rank_with_the_workers_own_traceback(further):
    error = task_error("\n".join(["2 problems:", *further]))
    with pytest.raises(RemoteFailure) as failure:
        workers(Call(), Call(error=error)).broadcast(work, timeout=1)
    first, *trace = str(failure.value).splitlines()
    assert first == "train worker.work: rank 1 failed: ValueError: 2 problems:"
    assert trace == ['  File "worker.py", line 3, in work', "ValueError: 2 problems:", *further]
    assert type(failure.value) is RemoteFailure


def test_a_dead_rank_is_the_root_of_the_failures_of_its_peers(tmp_path):
    (tmp_path / "train-1.log").write_text("".join(f"line {number}\n" for number in range(20)))
    lost_peer = Call(error=task_error("connection closed by peer"))
    logs = [str(tmp_path / f"train-{rank}.log") for rank in (0, 1)]
    group = workers(lost_peer, Call(error=RayActorError()), logs=logs)
    with pytest.raises(WorkerDied, match=r"train worker\.work: the process of train-1 died: ") as failure:
        group.broadcast(work, timeout=1)
    assert f"{tmp_path}/train-1.log ends with:\n  line 12\n" in str(failure.value)
    assert "closed by peer" not in str(failure.value)


@pytest.mark.parametrize(
    "error",
    [
        task_error("CUDA out of memory. Tried to allocate 2.00 GiB."),
        task_error("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory"),
        Died("The actor died.\n\texit detail: Worker was killed due to the node running low on memory."),
    ],
)
def test_a_lack_of_memory_is_the_root_of_all_other_failures(error):
    lost = Call(error=Died("worker died. connection error code 2. End of file"))
    with pytest.raises(OutOfMemory, match="rank 1") as failure:
        workers(lost, Call(error=error)).broadcast(work, timeout=1)
    assert failure.value.call == "train worker.work"


def test_a_failure_names_the_actor_of_a_mixed_call_and_the_first_error_in_its_log(tmp_path):
    logs = [str(tmp_path / name) for name in ("train-0.log", "train-1.log", "rollout-0.log")]
    (tmp_path / "rollout-0.log").write_text(
        "starting\n(EngineCore pid=7) ERROR [core.py:11] ValueError: No available memory for the cache blocks.\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    failed = Call(error=task_error("Engine core initialization failed. See root cause above."))
    with pytest.raises(RemoteFailure, match=r"^start-up: rollout-0 failed: ValueError: Engine core") as failure:
        gather([Call(), Call(), failed], "start-up", 1, logs)
    last = str(failure.value).splitlines()[-1]
    assert last == f"the first error in {logs[2]}: ValueError: No available memory for the cache blocks."


def test_an_error_of_the_process_that_had_a_log_before_is_not_the_cause_of_a_new_failure(tmp_path):
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "train-0.log"
    log.write_text("starting\nValueError: of the first attempt\n")
    start = f"import sys; from hybridrl.runtime.guard import begin_actor; begin_actor({str(log)!r}); print(sys.argv[1])"
    for line in ("ready", ""):
        subprocess.run([sys.executable, "-c", start, line], check=True)
    with pytest.raises(RemoteFailure, match="metadata is None") as failure:
        gather([Call(error=task_error("metadata is None"))], "train worker.load", 1, [str(log)])
    with pytest.raises(WorkerDied) as died:
        gather([Call(error=RayActorError())], "train worker.load", 1, [str(log)])
    with suppress(RuntimeError), recording(tmp_path):
        raise RuntimeError("train-0 died")
    said = f"{failure.value} {died.value} {read_faults(tmp_path)[-1].tail}"
    assert "ready" not in said and "attempt" not in said and "the first" not in said


def test_a_log_that_is_not_here_is_named_with_both_reasons(tmp_path):
    why = r"\(no such file is here: the process has written none, or is on another machine\)"
    with pytest.raises(WorkerDied, match=rf"0.log ends with:\n  {why}"):
        gather([Call(error=RayActorError())], "train worker.work", 1, [str(tmp_path / "0.log")])


def test_ranks_without_a_response_are_named():
    with pytest.raises(WorkerDied) as failure:
        workers(Call(responds=False), Call(), Call(responds=False)).broadcast(work, timeout=0.05)
    assert str(failure.value) == (
        "train worker.work: no response from rank 0, rank 2 within 0.05 s (1 responded; the limit follows from "
        "trainer.step_timeout)"
    )


def test_at_the_limit_the_message_names_key_rank_place_and_log():
    logs = ["/logs/train-0.log", "/logs/train-1.log"]
    with pytest.raises(WorkerDied) as failure:
        gather([Call(), Call(responds=False)], "start-up", 0.05, logs, key=START_LIMIT, about=" (bucket 3)")
    assert str(failure.value) == (
        "start-up (bucket 3): no response from train-1 within 0.05 s (1 responded; the limit follows from "
        "trainer.startup_timeout)\n  train-1: in all_reduce (/logs/train-1.log); its log: /logs/train-1.log"
    )
    assert failure.value.silent == ("/logs/train-1.log",)


def test_a_rank_that_others_waited_for_until_their_collective_timed_out_counts_as_dead():
    lost_peer = Call(error=task_error("[gloo] Timed out waiting 600000ms for recv operation to complete"))
    with pytest.raises(WorkerDied, match=r"train-0 failed: ValueError: .gloo. Timed out") as failure:
        gather([lost_peer, Call(responds=False)], "train worker.work", 1, ["/logs/train-0.log", "/logs/train-1.log"])
    last = str(failure.value).splitlines()[-2:]
    assert last == [
        "not responding meanwhile:",
        "  train-1: in all_reduce (/logs/train-1.log); its log: /logs/train-1.log",
    ]


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("CUDA error: an illegal memory access was encountered", WorkerDied),
        ("NCCL error in: NCCLUtils.hpp: remote process exited or there was a network error", WorkerDied),
        ("[../pair.cc:534] Connection closed by peer [127.0.0.1]:4711", WorkerDied),
        ("no such row", RemoteFailure),
    ],
)
def test_a_rank_that_lost_its_device_or_a_connection_counts_as_dead_as_a_new_one_may_succeed(message, kind):
    with pytest.raises(RemoteFailure) as failure:
        workers(Call(), Call(error=task_error(message))).broadcast(work, timeout=1)
    assert type(failure.value) is kind


def reports(capsys) -> list[list[str]]:
    """What was reported, without the marks of a warning."""
    lines = capsys.readouterr().out.removeprefix("warning: ").split("train worker.work: ")[1:]
    return [f"train worker.work: {line}".removesuffix("warning: ").splitlines() for line in lines]


def test_a_death_right_after_a_stack_was_requested_by_a_signal_is_named_as_such(monkeypatch, tmp_path):
    log = tmp_path / "train-0.log"
    log.write_text("the last line\n")
    monkeypatch.setitem(stacks.signalled, str(log), time.monotonic())
    died = Call(error=Died("worker died. connection error code 2. End of file"))
    with pytest.raises(WorkerDied, match="it died within 1 s of the SIGUSR1 that requested its stack\n"):
        workers(died, logs=[str(log)]).broadcast(work, timeout=1)
    monkeypatch.setitem(stacks.signalled, str(log), time.monotonic() - 60)
    with pytest.raises(WorkerDied, match=r"as if killed (?!.*SIGUSR1)"):
        workers(died, logs=[str(log)]).broadcast(work, timeout=1)


def test_silence_is_reported_with_ranks_and_places_at_doubling_intervals(watched, capsys):
    watched(silent=0.05, poll=0.01)
    group = workers(Call(responds=False), Call(), logs=["/logs/train-0.log", "/logs/train-1.log"])
    with pytest.raises(WorkerDied):
        group.broadcast(work, timeout=0.6)
    first, *later = reports(capsys)
    assert first == [
        "train worker.work: 1 not done after 0 s (the first such call); still waiting",
        "  train-0: in all_reduce (/logs/train-0.log); its log: /logs/train-0.log",
    ]
    assert 2 <= len(later) <= 3, "after 0.05, 0.1, 0.2 and 0.4 s"


def test_a_call_that_usually_takes_long_is_reported_after_five_times_its_median(watched, capsys):
    watched(silent=0.01, poll=0.01)
    module.durations["train worker.work"] += [0.001, 0.04, 10.0]
    with pytest.raises(WorkerDied):
        workers(Call(responds=False)).broadcast(work, timeout=0.15)
    assert not reports(capsys)
    assert workers(Call(responds=False)).failures(work, timeout=0.3)
    ((report,),) = reports(capsys)
    assert report == "train worker.work: 1 not done after 0 s (usually 0.04 s); still waiting"


def test_only_calls_that_were_completed_count_as_usual():
    workers(Call(), Call()).broadcast(work, timeout=1)
    with pytest.raises(WorkerDied):
        workers(Call(responds=False)).broadcast(work, timeout=0.01)
    (duration,) = module.durations["train worker.work"]
    assert 0 <= duration < 0.1


@pytest.mark.parametrize(("step", "control"), [(60, 60), (7200, 300), (14400, 600)])
def test_calls_that_take_seconds_have_a_limit_of_minutes(step, control):
    assert control_limit(step) == control


def test_silence_names_the_runtime_environment_that_the_user_set(ray):
    ray.runtime_env = {"pip": ["nothing"]}
    with pytest.raises(WorkerDied, match=r"check ray_kwargs.ray_init.runtime_env={'pip': \['nothing'\]}"):
        gather([Call(responds=False)], "server.work", 0.01)


def test_a_lost_ray_ends_the_wait_before_the_deadline(monkeypatch):
    replace_ray(monkeypatch, FakeRay(), lost="raylet")
    with pytest.raises(WorkerDied, match="Ray's raylet ended without a message"):
        wait([Call(responds=False)], 100)


def test_failures_give_the_reason_of_each_rank_that_failed_or_did_not_respond():
    group = workers(Call(), Call(responds=False), Call(error=task_error("broken")))
    failures = {rank: str(cause) for rank, cause in group.failures(work, timeout=0.5).items()}
    assert failures == {1: "no response within 0.5 s", 2: "ValueError: broken"}


def test_a_part_of_a_group_keeps_role_and_logs():
    part = workers(Call("a"), Call("b"), Call("c"), logs=["0", "1", "2"]).only([2, 0])
    assert (part.role, part.logs, len(part)) == ("train worker", ["2", "0"], 2)
    assert part.broadcast(work, timeout=1) == [("c",), ("a",)]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("worker died. connection error code 2. End of file", "it ended without a message, as if killed "),
        ("The actor died.\n\texit detail: out of disk\n\tmore", "out of disk"),
        ("The  actor\ndied.", "The actor died."),
    ],
)
def test_the_reason_of_a_death_is_one_line(message: str, reason: str):
    assert cause(Died(message)).startswith(reason)
    assert "\n" not in cause(Died(message))
