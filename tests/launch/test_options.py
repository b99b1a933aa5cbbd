"""Options of `hybridrl launch`: what contradicts is rejected with a fix, and files are written and submitted."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hybridrl.launch import quoted
from hybridrl.launch.__main__ import address, main
from tests.launch.hosts import POOLS, RUN

SLURM, SSH = ["slurm", "--nodes", "2", "--gpus", "8"], ["ssh", "--hosts", "hosts", "--gpus", "8"]
KUBERAY = ["kuberay", "--nodes", "2", "--gpus", "8", "--container", "image", "--mounts", "claim:/shared"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*SLURM, "--", *RUN, "trainer.nnodes=3"], "--nodes 2 --gpus 8 are not the machines of the command's keys; "),
        ([*SLURM, "--", *RUN, "trainer.nnodes=3"], "; --nodes 3 --gpus 8\n"),
        ([*SLURM, "--", *RUN, "trainer.device=cpu"], "; --nodes 2 --gpus 0\n"),
        ([*SLURM, "--", *RUN, *POOLS], "; --nodes 3 --gpus 8 or --nodes 2 --gpus 16\n"),
        ([*SLURM, "--", *RUN, "trainer.nnodse=3"], "unknown key trainer.nnodse; nearest: trainer.nnodes"),
        ([*SLURM, "--", "data.train_files=rows.jsonl"], "model.path"),
        ([*SLURM, "--hosts", "hosts", "--", *RUN], "--hosts has no effect on slurm; leave it out; it is for ssh\n"),
        ([*SLURM, "--min-nodes", "1", "--", *RUN], "--min-nodes has no effect on slurm; leave it out; it is for ssh\n"),
        ([*SSH, "--container", "a", "--", *RUN], "--container has no effect on ssh; leave it out; it is for slurm, "),
        ([*SSH, "--nodes", "2", "--", *RUN], "--nodes 2 --min-nodes 0 for 3 hosts; leave --nodes out"),
        ([*SSH, "--min-nodes", "4", "--", *RUN], "--nodes 3 --min-nodes 4 for 3 hosts; leave --nodes out"),
        (["ssh", "--gpus", "8", "--", *RUN], "--hosts is not set; --hosts FILE: "),
        (["slurm", "--gpus", "8", "--", *RUN], "--nodes is not set; --nodes N: "),
        (["slurm", "--nodes", "2", "--", *RUN], "--gpus is not set; --gpus [TYPE:]N: "),
        ([*SSH[:3], "--gpus", "H100:8", "--", *RUN], "--gpus 'H100:8' has another form; --gpus [TYPE:]N: "),
        (["skypilot", "--nodes", "2", "--gpus", "8", "--", *RUN], "--gpus '8' has another form; "),
        ([*SLURM, "--env", "A B=1", "--", *RUN], "--env 'A B=1' has another form; --env NAME=VALUE: "),
        ([*SLURM, "--partition", "a\nb", "--", *RUN], "--partition 'a\\nb' has another form; "),
        ([*SLURM, "--interface", "a;b", "--", *RUN], "--interface 'a;b' has another form; "),
        ([*KUBERAY[:5], "--mounts", "claim:/shared", "--", *RUN], "--container is not set; --container IMAGE: "),
        (
            [*KUBERAY, "--", *RUN],
            "would be lost with its machine; name a directory below /PLACE of --mounts FROM:/PLACE",
        ),
    ],
)
def test_a_contradiction_is_rejected_with_its_fix(words, message, capsys):
    assert main(words) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""


@pytest.mark.parametrize("text", ["", "a\nb\n", "a a", "a\na", "-oProxyCommand=x", "me@a", "a b"])
def test_a_file_of_hosts_has_a_name_per_line_each_once(text, capsys):
    Path("hosts").write_text(text)
    assert main([*SSH, "--", *RUN]) == (0 if text == "a\nb\n" else 2)
    assert "--hosts hosts: " in capsys.readouterr().err or text == "a\nb\n"


def test_options_of_the_scheduler_are_passed_on_as_they_are(capsys):
    assert main([*SLURM, "--time", "4:00:00", "--scheduler-args", "--qos", "a b", "--", *RUN]) == 0
    assert "#SBATCH --mem=0 --gpus-per-node=8 --time=4:00:00 --qos 'a b'\n" in capsys.readouterr().out
    assert main([*SSH, "--user", "me", "--scheduler-args", "-p", "2222", "--", *RUN]) == 0
    assert "-lme -p 2222 " in capsys.readouterr().out
    assert main([*SSH, "--interface", "nic", "--", *RUN]) == 0
    assert "export GLOO_SOCKET_IFNAME=nic\n    export NCCL_SOCKET_IFNAME=nic\n" in capsys.readouterr().out


def test_a_file_is_for_its_owner_and_none_is_overwritten(capsys):
    assert main([*SLURM, "--out", "file", "--", *RUN]) == 0
    assert stat.S_IMODE(os.stat("file").st_mode) == 0o600 and capsys.readouterr().out == ""
    before = Path("file").read_text()
    assert main([*SSH, "--out", "file", "--", *RUN]) == 2
    assert "File exists: 'file'; name a new file" in capsys.readouterr().err and Path("file").read_text() == before


@pytest.mark.parametrize("engine", ["slurm", "ssh", "kuberay", "skypilot"])
def test_a_submitted_file_gets_to_the_scheduler_whose_status_is_returned(engine, tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "kubectl", "sky"):
        (tmp_path / "bin" / name).write_text(f'#!/bin/bash\necho "{name} $*"; cat "${{!#}}" >submitted; exit 7\n')
        (tmp_path / "bin" / name).chmod(0o755)
    mounts = ["--mounts", "claim:/shared", "--", *RUN, "trainer.default_local_dir=/shared/run"]
    words = {
        "slurm": [*SLURM, "--submit", "--", *RUN],
        "ssh": [*SSH, "--submit", "--before", "exit 7", "--", *RUN],
        "kuberay": [*KUBERAY[:7], "--submit", *mounts],
        "skypilot": ["skypilot", "--nodes", "2", "--gpus", "H100:8", "--submit", *mounts],
    }[engine]
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "hybridrl", "launch", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    if engine != "ssh":
        program = {"slurm": "sbatch /", "kuberay": "kubectl create -f /", "skypilot": "sky jobs launch -y /"}[engine]
        assert done.stdout.startswith(program) and "hybridrl" in Path("submitted").read_text()


def test_without_the_program_of_the_scheduler_the_file_can_be_written(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert main([*SLURM, "--submit", "--", *RUN]) == 2
    assert "No such file or directory: 'sbatch'; name a new file with --out" in capsys.readouterr().err


def test_the_directory_of_logs_exists_before_slurm_opens_the_first(capsys):
    assert main([*SLURM, "--", *RUN, "trainer.default_local_dir='a 100% run'"]) == 0
    assert Path("a 100% run/launch").is_dir()
    line = f"#SBATCH --output='{Path.cwd()}/a 100%% run/launch'/%j.log\n"
    assert line in capsys.readouterr().out


def test_machines_of_pods_have_the_image_the_gpus_and_the_volumes(capsys):
    words = ["--env", "A=$b", "--", *RUN, "trainer.default_local_dir=/shared/run"]
    assert main([*KUBERAY, *words]) == 0
    cluster = yaml.safe_load(capsys.readouterr().out)["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (1, 1, 1)
    for group in (cluster["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"] == "image" and container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
        assert {"name": "A", "value": "$$b"} in container["env"]
        assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/dev/shm", "/shared"]


def test_the_address_is_that_of_the_route_or_of_the_interface():
    assert address("127.0.0.1") == address("10.0.0.1", "lo") == address("127.0.0.5", here="localhost") == "127.0.0.1"


@pytest.mark.parametrize(
    ("words", "cause"), [(["x", "nic9"], "nic9"), (["127.0.0.1", "", "192.0.2.1"], "not 192.0.2.1")]
)
def test_a_machine_without_the_address_is_named(words, cause, capsys):
    assert main(["address", *words]) == 2
    assert cause in capsys.readouterr().err


def test_a_word_in_quotes_is_on_one_line_and_the_same_bytes():
    for text in ("", "a", "it's", "a\nb", "\x80\r\\'\"$`!", "é\u2028", "\udcff"):
        word = quoted(text)
        assert "\n" not in word and "\r" not in word
        done = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True)
        assert done.stdout == os.fsencode(text)
