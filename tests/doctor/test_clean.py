"""`hybridrl clean`: what dead runs have left, and that nothing of living ones is touched."""

import os
import subprocess
import sys
from contextlib import closing
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import psutil
import pytest

from hybridrl.checkpoint.store import Store
from hybridrl.doctor import __main__ as doctor
from hybridrl.doctor.leftovers import leftovers
from hybridrl.required import required
from hybridrl.runtime import keeper

TOP = Path(__file__).parents[2]
OWNER = """
import os, subprocess, sys
from pathlib import Path
from hybridrl.runtime import keeper
keeper.ROOT = Path(sys.argv[1])
private = keeper.PrivateDirectory()
child = subprocess.Popen(["sleep", "60"], env=os.environ | private.environment, start_new_session=True)
print(private.path, child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def own_root(tmp_path, monkeypatch) -> Path:
    """A place of this test alone instead of /tmp."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(keeper, "ROOT", tmp_path / "tmp")
    return tmp_path / "tmp"


@pytest.fixture
def owner(own_root):
    """A process with a private directory and a child that uses it."""
    command = [sys.executable, "-c", OWNER, str(own_root)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(TOP)}, **pipes)
    path, pid = required(process.stdout).readline().split()
    child = psutil.Process(int(pid))
    yield process, Path(path), child
    process.kill()
    process.wait()
    if child.is_running():
        child.kill()


def keeper_of(directory: Path) -> psutil.Process:
    (found,) = [one for one in psutil.process_iter(["cmdline"]) if str(directory) in (one.info["cmdline"] or [])]
    return found


def test_the_directory_and_processes_of_a_killed_run_are_listed_and_removed_on_request(owner, capsys):
    process, directory, child = owner
    assert doctor.command("clean", []) == 0 and "nothing is left" in capsys.readouterr().out
    keeper = keeper_of(directory)
    keeper.kill()
    keeper.wait(10)
    assert doctor.command("clean", []) == 0, "its owner lives"
    process.kill()
    process.wait()
    capsys.readouterr()
    assert doctor.command("clean", []) == 1
    assert f"left: {directory}, and its processes: {child.pid} sleep" in capsys.readouterr().out
    assert directory.exists() and child.is_running()
    assert doctor.command("clean", ["--yes"]) == 0
    assert not directory.exists()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert doctor.command("clean", []) == 0


def test_an_unfinished_checkpoint_is_removed_and_a_complete_one_published_unless_it_lives(own_root, tmp_path, capsys):
    run = tmp_path / "run"
    with closing(Store(run)) as store:
        (store.begin(1) / "half").write_bytes(bytes(2_000_000))
        store.begin(2)
        store.complete(2, {"healthy": True, "recovery": False, "metrics": {}, "sharded": []})
        assert doctor.command("clean", [str(run)]) == 0
    capsys.readouterr()
    assert doctor.command("clean", [str(run)]) == 1
    assert f"left: {run}/.global_step_1.writing (2.0 MB; published if it is complete)" in capsys.readouterr().out
    assert doctor.command("clean", [str(run), "--yes"]) == 0
    assert [path.name for path in run.glob("*global_step_*")] == ["global_step_2"]


def test_shared_memory_is_removed_if_no_process_has_mapped_it(own_root, capsys):
    segment = shared_memory.SharedMemory(create=True, size=1000)
    resource_tracker.unregister(f"/{segment.name}", "shared_memory")
    path = Path("/dev/shm", segment.name)
    try:
        doctor.command("clean", ["--shared-memory"])
        assert str(path) not in capsys.readouterr().out
        segment.close()
        doctor.command("clean", [])
        assert str(path) not in capsys.readouterr().out, "not on request"
        doctor.command("clean", ["--shared-memory"])
        assert f"left: {path}" in capsys.readouterr().out
    finally:
        path.unlink()


def test_a_process_may_end_while_those_that_use_something_are_searched(own_root, tmp_path, vanishing):
    vanishing("/environ", "/maps")
    (tmp_path / "psm_12345678").touch()
    (line,) = leftovers([], tmp_path, remove=False)
    assert line.startswith(f"{tmp_path}/psm_12345678 (")
    child = subprocess.Popen(["sleep", "60"], env=os.environ | {"TMPDIR": str(own_root)})
    try:
        assert keeper.working_in(own_root) == [child.pid]
    finally:
        child.kill()
        child.wait()


def test_a_directory_that_is_not_there_is_a_usage_error(own_root, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        doctor.command("clean", [str(tmp_path / "none")])
    assert "there is no such directory" in capsys.readouterr().err
