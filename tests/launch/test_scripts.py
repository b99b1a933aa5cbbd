"""Scripts for Slurm and ssh, with stand-ins for Ray and hybridrl: signals, exit status, requeue, hosts that are late or
dead, and what is left."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.conftest import RUN, Cluster, Rendered

NEEDED = {"slurm": ["--nodes", "3"], "ssh": ["--hosts", "hosts"]}
both = pytest.mark.parametrize("engine", NEEDED)


@pytest.fixture
def script(rendered: Rendered, cluster: Cluster) -> Callable[..., Path]:
    def write(engine: str, *options: str, wait: int = 5) -> Path:
        words = [*RUN, f"trainer.default_local_dir={cluster.run}"]
        return rendered(engine, [*NEEDED[engine], "--gpus", "8", "--wait", str(wait), *options], words)

    return write


@both
def test_all_is_well(engine, script, cluster):
    process = cluster.start(script(engine, "--env", "MINE=a b"))
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert cluster.read("steps") == "1\n2\n3\n" and cluster.left == []
    assert sorted(path.name for path in cluster.state.glob("ray-start-*")) == [f"ray-start-host-{x}" for x in "abc"]
    assert "--head --port=6379 --node-ip-address=10.0.0.1" in cluster.read("ray-start-host-a")
    assert "--address=10.0.0.1:6379 --node-ip-address=10.0.0.1" in cluster.read("ray-start-host-b")
    assert "doctor cluster 10.0.0.1:6379 a b\n" in cluster.read("calls")
    assert [path.suffix for path in (cluster.run / "launch").iterdir()] == [".log"] * len(
        [*(cluster.run / "launch").iterdir()]
    )


@both
def test_the_exit_status_is_that_of_the_driver(engine, script, cluster):
    process = cluster.start(script(engine), STATUS="3")
    process.communicate(timeout=30)
    assert process.returncode == 3 and cluster.left == []


@both
def test_the_run_does_not_start_where_the_check_fails(engine, script, cluster):
    process = cluster.start(script(engine), DOCTOR="1")
    process.communicate(timeout=30)
    assert process.returncode == 1 and cluster.read("steps") == "" and cluster.left == []


@both
def test_a_late_host_is_waited_for(engine, script, cluster):
    process = cluster.start(script(engine, wait=15), LATE="host-c", DELAY="3")
    output, _ = process.communicate(timeout=40)
    assert process.returncode == 0 and cluster.read("steps") == "1\n2\n3\n", output


@both
def test_a_dead_host_is_named_with_the_last_line_of_its_log(engine, script, cluster):
    began = time.monotonic()
    process = cluster.start(script(engine, wait=2), DEAD="host-b")
    output, _ = process.communicate(timeout=30)
    text = output + "".join(path.read_text() for path in (cluster.run / "launch").glob("*.log"))
    assert process.returncode == 1 and time.monotonic() - began < 12
    (line,) = [line for line in text.splitlines() if line.startswith("host-b has not")]
    assert line.endswith(": connect to host host-b port 22: No route to host")
    assert cluster.read("steps") == "" and cluster.left == []


def test_ssh_starts_on_the_hosts_that_answer_if_they_are_enough(script, cluster):
    process = cluster.start(script("ssh", "--min-nodes", "2"), DEAD="host-b")
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and "starting on 2 of 3 hosts: trainer.nnodes=2" in output
    words = cluster.read("words").split("\0")
    assert words[0] == "trainer.nnodes=3" and words[-2] == "trainer.nnodes=2" and cluster.read("steps") == "1\n2\n3\n"


@both
def test_a_host_that_is_ready_before_the_head_repeats_its_attempt(engine, script, cluster):
    process = cluster.start(script(engine, wait=15), LATE="host-a" if engine == "slurm" else "", DELAY="2")
    output, _ = process.communicate(timeout=40)
    assert process.returncode == 0, output
    assert engine == "ssh" or cluster.read("ray-start-host-b").count("--address") > 1


def stop(engine: str, process: object, cluster: Cluster, number: signal.Signals) -> None:
    """Send a signal to the script in the second step, as a scheduler does, and not to what it has started."""
    cluster.wait_for("began-steps", "2")
    pid = int(cluster.read("batch.pid")) if engine == "slurm" else process.pid
    os.kill(pid, number)


@both
def test_sigterm_stops_after_the_step_and_the_same_file_resumes(engine, script, cluster):
    file = script(engine)
    process = cluster.start(file, PACE="0.5")
    stop(engine, process, cluster, signal.SIGTERM)
    process.communicate(timeout=30)
    assert (process.returncode, cluster.read("steps"), cluster.left) == (130, "1\n2\n", [])
    again = cluster.start(file)
    again.communicate(timeout=30)
    assert (again.returncode, cluster.read("steps"), cluster.read("requeued")) == (0, "1\n2\n3\n", "")


def test_at_the_time_limit_a_job_of_slurm_is_requeued_once(script, cluster):
    process = cluster.start(script("slurm"), PACE="0.5")
    stop("slurm", process, cluster, signal.SIGUSR1)
    process.communicate(timeout=30)
    assert (process.returncode, cluster.read("requeued"), cluster.read("steps")) == (0, "71\n", "1\n2\n3\n")
    assert cluster.left == []


def test_a_job_that_has_saved_no_step_is_not_requeued(script, cluster):
    process = cluster.start(script("slurm"), PACE="0.5", NEVER_SAVES="1")
    stop("slurm", process, cluster, signal.SIGUSR1)
    process.communicate(timeout=30)
    assert (process.returncode, cluster.read("requeued")) == (130, "")


@both
def test_a_request_to_stop_while_hosts_are_waited_for_ends_the_script(engine, script, cluster):
    process = cluster.start(script(engine, wait=30), LATE="host-c", DELAY="25")
    if engine == "slurm":
        cluster.wait_for("calls", "doctor")
    else:
        cluster.wait_for("calls", "launch address")
        time.sleep(0.5)
    os.kill(int(cluster.read("batch.pid")) if engine == "slurm" else process.pid, signal.SIGTERM)
    process.communicate(timeout=15)
    assert process.returncode in (130, 143) and cluster.read("steps") == "" and cluster.left == []


def test_a_script_whose_shell_is_killed_leaves_no_ray(script, cluster):
    process = cluster.start(script("ssh"), PACE="20")
    cluster.wait_for("began-steps", "1")
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while [*cluster.state.glob("alive-*")] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [*cluster.state.glob("alive-*")] == []
