"""What an engine that ran out of memory is built with next."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from hybridrl.core.cluster import RemoteFailure
from hybridrl.core.cluster.failures import Cause
from hybridrl.core.rollout import fleet as fleets
from hybridrl.core.rollout.fleet import RolloutFleet
from hybridrl.core.rollout.ladder import EngineOutOfMemory, MemoryLadder, memory_settings, one_notch_lower, shortage
from hybridrl.core.rollout.ladder import with_settings as section_with
from hybridrl.runtime.guard import oom_kills
from hybridrl.tracking.faults import code_of

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
NO_ROOM = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
OUT_OF_MEMORY, TOO_SMALL = (
    Cause("rollout-0", "EngineOutOfMemory", "its message", lost=False, error=EngineOutOfMemory(reason))
    for reason in (OOM, NO_ROOM)
)
KILLED = Cause("rollout-0", "ActorDiedError", "it ended without a message, as if killed by hand", killed=True)
LATE = Cause("rollout-1", "TimeoutError", "no response within 30 s")


@dataclass(frozen=True)
class EngineArguments:
    vllm: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """The keys of the rollout's section that are used here."""

    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.5
    request_retries: int = 3
    engine_kwargs: EngineArguments = field(default_factory=EngineArguments)


def notches(device: str, reason: str = OOM, count: int = 4, **settings: float) -> list[tuple]:
    """The values of `count` attempts in a row, in the order of the settings' names."""
    now, values = {"max_num_seqs": 256, "gpu_memory_utilization": 0.5} | settings, []
    for attempt in range(count):
        lower = one_notch_lower(now, attempt, device, reason)
        if lower is None:
            break
        now = lower
        values.append(tuple(now.values()))
    return values


def test_requests_at_a_time_are_halved_first_then_the_share_of_the_gpu_is_lowered_in_turn():
    assert notches("cuda") == [(128, 0.5), (128, 0.4), (64, 0.4), (64, 0.3)]


def test_on_cpu_the_cache_is_halved_where_its_size_is_set_and_its_share_of_the_memory_otherwise():
    assert notches("cpu") == [(128, 0.5), (128, 0.25), (64, 0.25), (64, 0.125)]
    key = "engine_kwargs.vllm.kv_cache_memory_bytes"
    halved = [(128, 1 << 30), (128, 1 << 29), (64, 1 << 29), (64, 1 << 28)]
    assert notches("cpu", **{key: 1 << 30}) == [(requests, 0.5, size) for requests, size in halved]


def test_a_share_that_is_too_small_for_the_cache_is_not_lowered_further():
    assert notches("cuda", NO_ROOM) == [(128, 0.5), (64, 0.5), (32, 0.5), (16, 0.5)]


def test_a_share_that_the_device_does_not_have_free_is_lowered_first():
    reason = "ValueError: Free memory is less than desired GPU memory utilization"
    assert notches("cuda", reason, 2) == [(256, 0.4), (256, 0.3)]


def test_at_the_floor_there_is_nothing_to_lower():
    assert notches("cuda", max_num_seqs=1, gpu_memory_utilization=0.1) == []
    assert notches("cuda", max_num_seqs=1, gpu_memory_utilization=0.2) == [(1, 0.1)]


@pytest.mark.parametrize(
    "text",
    [
        OOM,
        NO_ROOM,
        "RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you",
        "OSError: [Errno 12] Cannot allocate memory",
        "RuntimeError: cumem: CUDA Error: out of memory at csrc/cumem_allocator.cpp:62",
        "ValueError: Free memory on device cuda:0 (3.1/79 GiB) on startup is less than desired GPU memory utilization",
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    ],
)
def test_a_lack_of_memory_is_found_in_an_error_or_a_log(text):
    source = '(EngineCore pid=7) ERROR [core.py:15]     raise RuntimeError("out of memory")'
    assert shortage(["INFO starting\n", f"{source}\n(EngineCore pid=7) ERROR [core.py:15] {text}\n"]) == text


def test_another_failure_is_no_lack_of_memory():
    assert shortage(["terminate called after std::bad_alloc"]) == "terminate called after std::bad_alloc"
    assert not shortage(["EngineDeadError: EngineCore encountered an issue.", "KeyError: 'memory'"])


def test_settings_replace_those_of_the_section_and_nothing_else():
    section = Section(engine_kwargs=EngineArguments({"kv_cache_memory_bytes": 64, "block_size": 16}))
    key = "engine_kwargs.vllm.kv_cache_memory_bytes"
    lower = {"max_num_seqs": 8, "gpu_memory_utilization": 0.3, key: 32}
    changed = section_with(section, lower)
    assert changed == Section(8, 0.3, 3, EngineArguments({"kv_cache_memory_bytes": 32, "block_size": 16}))
    assert memory_settings(changed, key) == lower
    unset = memory_settings(section_with(Section(), {"max_num_seqs": 8}), key)
    assert unset == {"max_num_seqs": 8, "gpu_memory_utilization": 0.5}


def test_what_was_lowered_is_logged_once_with_the_override_to_keep_it(caplog):
    ladder = MemoryLadder(Section(), "cuda")
    used = ladder.settings
    ladder.lower(used, OOM)
    ladder.lower(used, OOM)  # a second engine of the same settings
    assert ladder.settings == {"max_num_seqs": 128, "gpu_memory_utilization": 0.5}
    assert [record.getMessage() for record in caplog.records] == [
        f"{OOM}; engines are built with max_num_seqs=128 from now on; to keep it, set "
        "actor_rollout_ref.rollout.max_num_seqs=128"
    ]


def test_after_request_retries_times_the_error_has_all_that_was_tried():
    ladder = MemoryLadder(Section(request_retries=2), "cuda")
    ladder.lower(ladder.settings, "first")
    ladder.lower(ladder.settings, "second")
    with pytest.raises(EngineOutOfMemory) as error:
        ladder.lower(ladder.settings, "third")
    assert str(error.value).splitlines()[1:5] == [
        "tried without enough memory:",
        "  max_num_seqs=256  gpu_memory_utilization=0.5  first",
        "  max_num_seqs=128  gpu_memory_utilization=0.5  second",
        "  max_num_seqs=128  gpu_memory_utilization=0.4  third",
    ]


def test_what_worked_is_used_by_a_resumed_run_unless_its_configuration_has_changed():
    ladder = MemoryLadder(Section(), "cuda")
    ladder.lower(ladder.settings, OOM)
    same, other = MemoryLadder(Section(), "cuda"), MemoryLadder(Section(max_num_seqs=64), "cuda")
    for resumed in (same, other):
        resumed.load_state_dict({"prompts": 8} | ladder.state_dict())
    assert same.settings["max_num_seqs"] == 128 and other.settings["max_num_seqs"] == 64
    same.load_state_dict({"prompts": 8})  # a checkpoint without it
    assert same.settings["max_num_seqs"] == 128


@pytest.fixture
def fleet(tmp_path) -> Any:
    """Two servers, as far as they know why they died."""
    fleet: Any = RolloutFleet.__new__(RolloutFleet)
    fleet.rollout = Section()
    fleet.ladder = MemoryLadder(fleet.rollout, "cuda")
    fleet.dead, fleet.started_with = {}, fleet.ladder.settings
    fleet.built_with = dict.fromkeys((0, 1), fleet.ladder.settings)
    fleet.oom_kills = dict.fromkeys((0, 1), oom_kills())
    logs = [str(tmp_path / f"rollout-{index}.log") for index in (0, 1)]
    fleet.servers = SimpleNamespace(actors=["a", "b"], logs=logs)
    fleet.log_starts = {0: 0, 1: 0}
    return fleet


def test_two_servers_that_lack_memory_at_the_same_time_lower_the_settings_once(fleet):
    assert fleet.note_death(0, OUT_OF_MEMORY) and fleet.note_death(1, OUT_OF_MEMORY)
    assert (fleet.rollout.max_num_seqs, fleet.rollout.gpu_memory_utilization) == (128, 0.5)


def test_the_failure_that_a_client_gets_has_all_that_was_tried(fleet):
    lacked = EngineOutOfMemory(OOM)
    traceback = f'  File "server.py", line 1, in take\nEngineOutOfMemory: {lacked}'
    failure = fleet.handle(0).failure(RayTaskError("take", traceback, lacked))
    tried = "tried without enough memory:\n  max_num_seqs=256  gpu_memory_utilization=0.5  rollout server 0: torch"
    assert tried in str(failure)
    assert OOM in failure.cause and "\n" not in failure.cause


def test_a_resumed_run_starts_its_engines_with_what_worked_and_logs_it_once(fleet, capsys):
    worked = {"max_num_seqs": 64, "gpu_memory_utilization": 0.4}
    state = {"engine_memory": {"configured": dict(fleet.ladder.configured), "lowered": worked}}
    fleet.load_state_dict(state)  # before the engines start, and again with all other parts of the run
    fleet.load_state_dict(state)
    assert (fleet.rollout.max_num_seqs, fleet.rollout.gpu_memory_utilization) == (64, 0.4)
    lowered = "actor_rollout_ref.rollout.max_num_seqs=64 actor_rollout_ref.rollout.gpu_memory_utilization=0.4"
    text = " ".join(capsys.readouterr().out.split())
    assert text == f"engines start with what had enough memory before: {lowered}"


def test_a_server_lost_for_another_reason_is_built_with_the_same_settings(fleet):
    assert not fleet.note_death(0, KILLED) and not fleet.note_death(1, LATE)
    assert fleet.rollout == Section()
    fleet.oom_kills[0] = -1  # when it was spawned: the kernel has killed since
    assert fleet.note_death(0, KILLED) and fleet.rollout.max_num_seqs == 128


def test_a_server_that_ended_without_a_message_lacked_memory_if_its_log_says_so(fleet):
    before = "RuntimeError: CUDA out of memory, of the server before this one\n"
    Path(fleet.servers.logs[0]).write_text(f"{before}terminate called after throwing an instance of 'std::bad_alloc'\n")
    fleet.log_starts[0] = len(before)
    assert fleet.note_death(0, KILLED)
    assert "std::bad_alloc" in fleet.ladder.table() and "before this one" not in fleet.ladder.table()
    Path(fleet.servers.logs[1]).write_text(before)
    fleet.log_starts[1] = len(before)
    assert not fleet.note_death(1, KILLED)


def test_an_engine_that_is_killed_for_lack_of_memory_a_second_time_is_the_last_with_all_processes_named(fleet):
    """Whether the kernel or Ray's monitor kills it; one that raises, as it lacks memory, is built again."""
    fleet.oom_kills[0] = -1  # the kernel has killed since
    for cause in (OUT_OF_MEMORY, KILLED):
        assert fleet.note_death(0, cause)
        fleet.built_with[0] = fleet.ladder.settings
    with pytest.raises(EngineOutOfMemory, match=r"(?s)tried without enough memory:.*all of this run: ") as error:
        fleet.note_death(0, replace(LATE, text="Task was killed due to the node running low on memory"))
    assert code_of(error.value) == "host-memory"


@pytest.fixture
def gathers(monkeypatch) -> Callable[[Callable], None]:
    """Have calls that are waited for end as a function says."""
    return lambda gather: monkeypatch.setattr(fleets, "gather", gather)


@pytest.fixture
def starts(fleet, gathers) -> list[int]:
    """What every engine that is waited for was built with; it starts with at most 64 requests at a time. A call that is
    waited for is the server's number and what it was built with."""
    attempts: list[int] = []

    def gather(pending, what, timeout, logs, **_):
        for _, sequences in pending:
            attempts.append(sequences)
            if sequences > 64:
                failure = RemoteFailure(f"{what}: {logs[0]}: the engine ran out of memory: {NO_ROOM}\n  File ...")
                failure.cause = TOO_SMALL
                raise failure

    def start(index):
        fleet.built_with[index] = fleet.ladder.settings
        return (index, fleet.rollout.max_num_seqs)

    fleet.servers, fleet.startup_timeout = SimpleNamespace(actors=["old", "old"], logs=["a.log", "b.log"]), 60.0
    gathers(gather)
    vars(fleet).update(_start=start, _spawn=lambda *_: "new", kill=lambda _: None)
    return attempts


def test_engines_that_cannot_start_for_lack_of_memory_are_built_again_with_less(fleet, starts):
    fleet.finish_start([(0, 256), (1, 256)], others=[("trainer", 0)], logs=["train.log"])
    # All at once; then the first server with ever less, and the second with what the first one started with.
    assert starts == [256, 256, 128, 64, 256, 64, 0] and fleet.servers.actors == ["new", "new"]


def test_a_start_that_fails_for_another_reason_is_not_repeated(fleet, starts, gathers):
    def gather(*_, **more):
        starts.append(0)
        raise RemoteFailure("rollout server.start: rollout-0 failed: ValueError: no such model")

    gathers(gather)
    with pytest.raises(RemoteFailure, match="no such model"):
        fleet.finish_start([(0, 256)])
    assert starts == [0] and fleet.rollout == Section()
