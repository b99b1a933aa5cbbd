"""faults.jsonl: what is recorded while a run is under way, and how its end is."""

import json
import logging
import signal
from pathlib import Path

import pytest

from hybridrl.checkpoint.store import SaveFailed
from hybridrl.config import ConfigError
from hybridrl.core.cluster import RemoteFailure, WorkerDied
from hybridrl.health import HealthMonitor
from hybridrl.rewards.score import RewardFaults
from hybridrl.runs.setup import host_memory_now
from hybridrl.runtime.guard import StopRequest
from hybridrl.tracking import faults
from hybridrl.tracking.console import warn
from hybridrl.tracking.faults import begin_step, code_of, last_run, read_faults, record, recording


def codes(directory: Path) -> list[str]:
    return [fault.code for fault in read_faults(directory)]


def test_warnings_logged_and_printed_are_recorded_with_step_and_code(tmp_path, capsys):
    with recording(tmp_path):
        warn("early")
        begin_step(3)
        logging.getLogger("hybridrl.core.rollout.client").warning("server %d", 1, extra={"code": "server-lost"})
        logging.getLogger("hybridrl.data.rows").info("nothing to worry about")
        HealthMonitor().warn("cut off", "truncation")
    warn("after the end")
    assert [(fault.step, fault.code, fault.text) for fault in read_faults(tmp_path)] == [
        (0, "begun", ""),
        (0, "warning", "early"),
        (3, "server-lost", "server 1"),
        (3, "truncation", "cut off"),
        (3, "finished", ""),
    ]
    assert "warning: cut off [truncation]" in capsys.readouterr().out


def test_a_record_has_the_time_the_memory_and_the_end_of_the_log_that_it_names(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rollout-1.log").write_text("".join(f"line {number}\n" for number in range(100)))
    with recording(tmp_path, host_memory_now):
        record("server-lost", "rollout server 1 was lost")
        record("server-lost", "rollout server 2 was lost")
    _, first, second, _ = read_faults(tmp_path)
    assert first.tail == [f"line {number}" for number in range(60, 100)] and second.tail == []
    assert first.memory["rss"] > 1e6 and first.memory["left"] > 1e6 and "oom_kills" in first.memory
    assert first.at <= second.at


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WorkerDied("update: the process of train-1 died: it ended"), "worker-died"),
        (WorkerDied("train-0 died: as if killed by the kernel for lack of memory: it has killed 2"), "host-memory"),
        (WorkerDied("as if killed by hand: the kernel has killed nothing here for lack of memory"), "worker-died"),
        (WorkerDied("train worker.update: no response from train-1 within 60 s (1 responded)"), "no-response"),
        (RemoteFailure("update: train-1 failed: torch.OutOfMemoryError: CUDA out of memory."), "device-memory"),
        (RemoteFailure("start-up: rollout-0 failed: ValueError: Engine core"), "engine-start"),
        (RemoteFailure("start-up: rollout-0 failed: No available memory for the cache blocks"), "device-memory"),
        (RemoteFailure("update: train-1 ran out of memory: DefaultCPUAllocator: can't allocate memory"), "host-memory"),
        (RemoteFailure("update: train-1 failed: NCCL failure 'out of memory'"), "device-memory"),
        (SaveFailed("step 4 could not be saved: [Errno 28] No space left on device: 'x'"), "disk-full"),
        (SaveFailed("step 4 could not be saved: [Errno 13] Permission denied"), "save-failed"),
        (RewardFaults('fault "raised:MemoryError": MemoryError'), "reward-faults"),
        (ConfigError("data.train_files=x: no response from y within z"), "rejected"),
        (MemoryError(), "host-memory"),
        (OSError(28, "No space left on device"), "disk-full"),
        (ZeroDivisionError("division by zero"), "unexpected"),
        (KeyboardInterrupt("SIGTERM"), "stopped"),
    ],
)  # fmt: skip
def test_an_end_has_the_code_of_its_class_or_of_what_its_text_shows(tmp_path, error, code):
    with pytest.raises(type(error)), recording(tmp_path):
        raise error
    assert codes(tmp_path) == ["begun", code] and code_of(error) == code


def test_the_log_of_a_process_that_died_shows_that_it_ran_out_of_memory(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "train-1.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried\n" + 20 * "at\n")
    with pytest.raises(WorkerDied), recording(tmp_path):
        raise WorkerDied("the process of train-1 died: it ended without a message")
    assert codes(tmp_path) == ["begun", "device-memory"]


def test_a_request_to_stop_is_recorded_when_it_arrives(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt), recording(tmp_path), StopRequest(wait_for_step=False):
        signal.raise_signal(signal.SIGTERM)
    assert [(fault.code, fault.text) for fault in read_faults(tmp_path)[1:]] == [
        ("stop-requested", "SIGTERM"),
        ("stopped", "SIGTERM"),
    ]


def test_a_later_run_appends_also_after_a_line_that_a_kill_cut_short(tmp_path):
    with recording(tmp_path):
        warn("old")
    path = tmp_path / "faults.jsonl"
    path.write_bytes(path.read_bytes() + b'{"time": "2026-')
    with recording(tmp_path):
        warn("new")
    assert codes(tmp_path) == ["begun", "warning", "finished", "begun", "warning", "finished"]
    assert [fault.text for fault in last_run(read_faults(tmp_path))] == ["", "new", ""]
    assert last_run([]) == []


def test_a_fault_that_repeats_does_not_fill_the_disk_and_the_end_is_always_there(tmp_path):
    with pytest.raises(SaveFailed), recording(tmp_path):
        for _ in range(3 * faults.PER_CODE):
            record("save-failed", "no permission")
        raise SaveFailed("the last one")
    assert len(read_faults(tmp_path)) == faults.PER_CODE + 2
    assert read_faults(tmp_path)[-1].text == "the last one"


def test_a_full_disk_is_no_error_and_what_had_no_room_is_written_later(tmp_path, full_disk):
    with recording(tmp_path):
        size = (tmp_path / "faults.jsonl").stat().st_size
        full_disk(size + 50)
        record("save-failed", "no room")
        record("save-failed", "no room yet")
        assert (tmp_path / "faults.jsonl").stat().st_size == size + 50 and codes(tmp_path) == ["begun"]
        full_disk(None)
    assert [fault.text for fault in read_faults(tmp_path)] == ["", "no room", "no room yet", ""]


def test_each_record_is_a_line_of_json(tmp_path):
    with recording(tmp_path):
        warn("two\nlines")
    lines = (tmp_path / "faults.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["", "two\nlines", ""]
