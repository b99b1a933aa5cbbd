"""Workers that are forked: what they find, how they end, and what happens without a fork server."""

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hybridrl.required import required
from hybridrl.runtime.environment import ForkServer, fork_server

WORKER = """
import json, os, sys, time
what, arguments = sys.argv[1], sys.argv[2:]
facts = {"arguments": arguments, "directory": os.getcwd(), "variable": os.environ.get("ONLY_HERE")}
facts |= {"imported": "colorsys" in sys.modules, "ray": "ray" in sys.modules, "path": sys.path[0]}
facts |= {"pid": os.getpid(), "parent": os.getppid()}
print(json.dumps(facts), flush=True)
print("to stderr", file=sys.stderr)
if what == "wait":
    time.sleep(100)
if what == "raise":
    raise ValueError("a worker's own error")
sys.exit(int(what))
"""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "5000", "LD_PRELOAD": ""}


@pytest.fixture
def make() -> Iterator[Callable[..., ForkServer]]:
    servers = []

    def start(*modules: str) -> ForkServer:
        servers.append(ForkServer(ENVIRONMENT, modules or ("colorsys",)))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.returncode is None:
            server.close()


@pytest.fixture
def worker(tmp_path) -> Callable[..., subprocess.Popen]:
    """Start a worker as Ray does, by the server's command."""
    (tmp_path / "worker.py").write_text(WORKER)

    def start(server: ForkServer, *arguments: str) -> subprocess.Popen:
        command = [*shlex.split(server.launch), str(tmp_path / "worker.py"), *arguments]
        variables = os.environ | {"ONLY_HERE": "a value \\ with 'quotes'"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=tmp_path, env=variables, **pipes)

    return start


def facts(process: subprocess.Popen) -> dict:
    return json.loads(required(process.stdout).readline())


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_worker_is_what_its_command_would_be_and_has_the_modules(make, worker, tmp_path):
    server = make()
    process = worker(server, "0", "one", "two words")
    found = facts(process)
    output, errors = process.communicate(timeout=10)
    assert (process.returncode, output, errors) == (0, "", "to stderr\n")
    assert found["arguments"] == ["one", "two words"]
    assert found["directory"] == found["path"] == str(tmp_path)
    assert found["variable"] == "a value \\ with 'quotes'"
    assert found["imported"] and not found["ray"]
    assert found["parent"] == server.process.pid


@pytest.mark.parametrize(("what", "status"), [("0", 0), ("7", 7), ("raise", 1)])
def test_the_command_ends_as_its_worker_does(make, worker, what, status):
    process = worker(make(), what)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == status
    assert ("ValueError: a worker's own error" in errors) == (what == "raise")


SLOW = "import time\ntime.sleep(1)\nimport colorsys"


def request(server: ForkServer, content: bytes, *descriptors: int) -> tuple[bytes, str]:
    """What the server replies to a request, and what the forked process writes to its error output."""
    errors, output = os.pipe()
    with socket.socket(socket.AF_UNIX) as launch, open(errors) as written:
        launch.settimeout(10)
        launch.connect(f"{server.directory.path}/socket")
        socket.send_fds(launch, [len(content).to_bytes(4)], [0, 1, output, *descriptors])
        os.close(output)
        launch.sendall(content)
        return launch.makefile("rb").read(), written.read()


def test_a_worker_whose_directory_is_gone_starts_in_it_as_its_command_would(make, tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "worker.py").write_text("import os\nprint(os.getppid(), os.readlink('/proc/self/cwd'))")
    gone, server = tmp_path / "gone", make("slow_to_import")
    gone.mkdir()
    command = [*shlex.split(server.launch), str(tmp_path / "worker.py")]
    process = subprocess.Popen(command, cwd=gone, stdout=subprocess.PIPE, text=True)
    gone.rmdir()
    assert process.communicate(timeout=10)[0] == f"{server.process.pid} {gone} (deleted)\n"
    assert process.returncode == 0 and not psutil.Process(server.process.pid).children()


@pytest.mark.parametrize(
    ("content", "directory", "reason"),
    [
        ({"command": ["worker.py"], "environment": {}}, "/dev/null", "NotADirectoryError"),
        ({"command": ["/there/is/no/worker.py"], "environment": {}}, "/", "FileNotFoundError"),
        ({"command": [], "environment": {}}, "/", "IndexError"),
        ({"command": ["worker.py"], "environment": {"": "no name"}}, "/", "OSError: [Errno 22] Invalid argument"),
        ({"command": ["worker.py"], "environment": {"number": 1}}, "/", "TypeError: str expected, not int"),
        ({"command": ["worker.py"]}, "/", "KeyError: 'environment'"),
        (["worker.py"], "/", "TypeError"),
        ({"command": ["worker.py"], "environment": {}}, None, "ValueError"),
    ],
)
def test_a_forked_process_that_cannot_become_its_worker_ends_with_the_reason(
    make, worker, tmp_path, content, directory, reason
):
    server = make()
    descriptors = [os.open(directory, os.O_PATH)] if directory else []
    reply, errors = request(server, json.dumps(content).encode(), *descriptors)
    assert reply == b"+" + (1).to_bytes(4)
    assert reason in errors or reason in Path(server.directory.path, "log").read_text()
    assert not psutil.Process(server.process.pid).children(), "none serves"
    assert facts(worker(server, "0"))["parent"] == server.process.pid


def test_a_worker_whose_output_nobody_reads_ends(make, worker):
    server = make()
    process = worker(server, "wait")
    pid = facts(process)["pid"]
    process.stdout.close()
    process.stderr.close()
    os.kill(pid, signal.SIGINT)  # which raises, and what it prints cannot be written
    assert process.wait(timeout=5) == 1
    assert not psutil.Process(server.process.pid).children()


def test_a_worker_that_ends_with_a_message_prints_it(make, tmp_path):
    (tmp_path / "worker.py").write_text("import sys\nsys.exit('no such thing')")
    command = [*shlex.split(make().launch), str(tmp_path / "worker.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=10)
    assert (ended.returncode, ended.stderr) == (1, "no such thing\n")


def test_a_process_that_an_import_has_left_does_not_end_the_server(make, worker, tmp_path, monkeypatch):
    (tmp_path / "leaves.py").write_text("import os, time\nif os.fork() == 0:\n    time.sleep(0.5)\n    os._exit(0)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = make("leaves")
    facts(worker(server, "0"))
    deadline = time.monotonic() + 5
    while psutil.Process(server.process.pid).children():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert facts(worker(server, "0"))["parent"] == server.process.pid


def test_workers_that_are_requested_while_the_server_imports_wait_for_it(make, worker, tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = make("slow_to_import")
    processes = [worker(server, "0") for _ in range(3)]
    assert all(facts(process)["parent"] == server.process.pid for process in processes)


def test_a_worker_ends_with_its_command_and_the_command_with_its_worker(make, worker):
    server = make()
    first, second = worker(server, "wait"), worker(server, "wait")
    pids = facts(first)["pid"], facts(second)["pid"]
    first.kill()
    assert gone(pids[0]) and psutil.Process(pids[1]).status() != psutil.STATUS_ZOMBIE
    os.kill(pids[1], signal.SIGKILL)
    assert second.wait(timeout=5) == 256 - signal.SIGKILL


def test_all_workers_end_with_the_server(make, worker):
    server = make()
    processes = [worker(server, "wait") for _ in range(2)]
    pids = [facts(process)["pid"] for process in processes]
    server.process.kill()
    assert all(map(gone, pids)) and [process.wait(timeout=5) for process in processes] == [1, 1]


def test_closing_the_server_ends_its_workers_and_leaves_no_file(make, worker):
    server = make()
    process = worker(server, "wait")
    pid = facts(process)["pid"]
    server.close()
    assert gone(pid) and not Path(server.directory.path).exists()
    process.wait(timeout=5)


@pytest.mark.parametrize("module", ["there_is_no_such_module", "starts_a_thread"])
def test_without_a_server_the_command_is_the_worker(make, worker, tmp_path, monkeypatch, module):
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = worker(make(module), "3", "argument")
    found = facts(process)
    process.communicate(timeout=10)
    assert process.returncode == 3
    assert (found["arguments"], found["pid"], found["imported"]) == (["argument"], process.pid, False)


def test_a_worker_is_forked_only_if_its_libraries_would_read_the_same_environment(make):
    server = make()
    assert server.serves({}) and server.serves({"OMP_NUM_THREADS": "1", "OTHER": "x"})
    assert not server.serves({"OMP_NUM_THREADS": "2"})
    assert not server.serves({"GOMP_SPINCOUNT": "300000"})


def test_libraries_read_the_user_s_own_variables_where_they_are_imported(make, worker, tmp_path, monkeypatch):
    (tmp_path / "lately.py").write_text("import os\nprint(os.environ['VLLM_LOGGING_LEVEL'], flush=True)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for value, read in ((None, "WARNING"), ("DEBUG", "DEBUG")):
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", value) if value else monkeypatch.delenv("VLLM_LOGGING_LEVEL", False)
        server = make("lately")
        worker(server, "0").communicate()
        assert Path(server.directory.path, "log").read_text() == f"{read}\n"


@pytest.mark.parametrize(("device", "address"), [("cuda", ""), ("cpu", "10.0.0.1:6379")])
def test_on_cuda_and_in_a_joined_ray_workers_start_by_themselves(monkeypatch, device, address):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with fork_server(device, {"address": address}, 1, engine="vllm") as forks:
        assert forks is None
