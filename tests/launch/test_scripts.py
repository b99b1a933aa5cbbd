"""Scripts for Slurm and ssh, with stand-ins for Ray and hybridrl: signals, exit status, requeue, hosts that are late or
dead, and what is left."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.conftest import Rendered
from tests.launch.hosts import RUN, Cluster

NEEDED = {"slurm": ["--nodes", "3"], "ssh": ["--hosts", "hosts"]}
both = pytest.mark.parametrize("engine", NEEDED)


@pytest.fixture
def script(rendered: Rendered, cluster: Cluster) -> Callable[..., Path]:
    def write(engine: str, *options: str, wait: int = 5) -> Path:
        words = [*RUN, f"trainer.default_local_dir={cluster.run}"]
        return rendered(engine, [*NEEDED[engine], "--gpus", "8", "--wait", str(wait), *options], words)

    return write


@both
def test_every_host_gets_a_ray_and_the_run_ends_with_0(engine, script, cluster):
    process = cluster.start(script(engine, "--env", "MINE=a b"))
    output = cluster.output(process)
    assert process.returncode == 0, output
    assert cluster.read("steps") == "1\n2\n3\n" and cluster.left == []
    assert "--head --port=6379 --node-name=host-a --node-ip-address=10.0.0.1 " in cluster.read("ray-start-host-a")
    for host in ("host-b", "host-c"):
        join = f"--address=10.0.0.1:6379 --node-name={host} --node-ip-address=10.0.0.1 "
        assert join in cluster.read(f"ray-start-{host}")
    assert "doctor cluster 10.0.0.1:6379 a b\n" in cluster.read("calls")


@both
def test_the_exit_status_is_that_of_the_driver(engine, script, cluster):
    process = cluster.start(script(engine), STATUS="3")
    cluster.output(process)
    assert process.returncode == 3 and cluster.left == []


@both
def test_the_run_does_not_start_where_the_check_fails(engine, script, cluster):
    process = cluster.start(script(engine), DOCTOR="1")
    cluster.output(process)
    assert process.returncode == 1 and cluster.read("steps") == "" and cluster.left == []


@both
def test_a_late_host_is_waited_for(engine, script, cluster):
    process = cluster.start(script(engine, wait=15), LATE="host-c", DELAY="3")
    output = cluster.output(process)
    assert process.returncode == 0 and cluster.read("steps") == "1\n2\n3\n", output


@both
def test_a_dead_host_is_named_with_the_last_line_of_its_log(engine, script, cluster):
    began = time.monotonic()
    process = cluster.start(script(engine, wait=2), DEAD="host-b")
    output = cluster.output(process)
    assert process.returncode == 1 and time.monotonic() - began < 12
    (line,) = [line for line in output.splitlines() if line.startswith("host-b has not")]
    assert line.endswith(": connect to host host-b port 22: No route to host")
    assert cluster.read("steps") == "" and cluster.left == []


def test_ssh_starts_on_the_hosts_that_answer_if_they_are_enough(script, cluster):
    process = cluster.start(script("ssh", "--min-nodes", "2"), DEAD="host-b")
    output = cluster.output(process)
    assert process.returncode == 0 and "starting on 2 of 3 hosts: trainer.nnodes=2" in output
    words = cluster.read("words").split("\0")
    assert words[0] == "trainer.nnodes=3" and words[-2] == "trainer.nnodes=2" and cluster.read("steps") == "1\n2\n3\n"


def test_a_host_that_is_ready_before_the_head_repeats_its_attempt(script, cluster):
    process = cluster.start(script("slurm", wait=15), LATE="host-a", DELAY="2")
    output = cluster.output(process)
    assert process.returncode == 0 and cluster.read("ray-start-host-b").count("--address") > 1, output


@both
def test_sigterm_stops_after_the_step_and_the_same_file_resumes(engine, script, cluster):
    file = script(engine)
    process = cluster.start(file, PACE="0.5")
    cluster.wait_for("began-steps", "2")
    cluster.signal(process, signal.SIGTERM)
    cluster.output(process)
    assert (process.returncode, cluster.read("steps"), cluster.left) == (130, "1\n2\n", [])
    again = cluster.start(file)
    cluster.output(again)
    assert (again.returncode, cluster.read("steps"), cluster.read("requeued")) == (0, "1\n2\n3\n", "")


@pytest.mark.parametrize(
    ("variables", "status", "requeued", "steps"),
    [({}, 0, "71\n", "1\n2\n3\n"), ({"NEVER_SAVES": "1"}, 130, "", "1\n2\n")],
)
def test_at_the_time_limit_a_job_is_requeued_once_if_it_has_saved(variables, status, requeued, steps, script, cluster):
    process = cluster.start(script("slurm"), PACE="0.5", **variables)
    cluster.wait_for("began-steps", "2")
    cluster.signal(process, signal.SIGUSR1)
    cluster.output(process)
    assert (process.returncode, cluster.read("requeued"), cluster.read("steps")) == (status, requeued, steps)
    assert cluster.left == []


@both
def test_a_request_to_stop_while_hosts_are_waited_for_ends_the_script(engine, script, cluster):
    process = cluster.start(script(engine, wait=30), LATE="host-c", DELAY="25")
    cluster.wait_for("calls", "doctor" if engine == "slurm" else "launch address")
    time.sleep(0.3)
    cluster.signal(process, signal.SIGTERM)
    cluster.output(process, seconds=15)
    assert process.returncode in (130, 143) and cluster.read("steps") == "" and cluster.left == []


def test_a_script_whose_shell_is_killed_leaves_no_ray(script, cluster):
    process = cluster.start(script("ssh"), PACE="5")
    cluster.wait_for("began-steps", "1")
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while [*cluster.state.glob("alive-*")] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [*cluster.state.glob("alive-*")] == []
