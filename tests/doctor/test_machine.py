from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.config import PPOConfig, load_ppo_config
from hybridrl.config.findings import Finding, Findings
from hybridrl.doctor.machine import Facts, Limits, cgroup_limits, check_machine

GIB = 1 << 30
HEALTHY = Facts(cores=8, memory_free=64 * GIB, shared_free=8 * GIB, open_files=65536, limits=Limits())


@pytest.fixture
def config(command: list[str]) -> PPOConfig:
    return load_ppo_config(command)


def warnings(config: PPOConfig, **facts: object) -> dict[str, Finding]:
    findings = Findings()
    check_machine(config, findings, replace(HEALTHY, **facts))
    return {finding.code: finding for finding in findings.found if finding.severity != "information"}


def test_of_a_healthy_machine_one_line_is_said(config: PPOConfig):
    findings = Findings()
    check_machine(config, findings, HEALTHY)
    assert [finding.text for finding in findings.found] == ["8 cores, 64.0 GiB of memory free, open files 65536"]


def test_docker_s_small_shared_memory_is_a_warning_unless_a_ray_is_joined(config, monkeypatch):
    assert "64 MiB free" in warnings(config, shared_free=64 << 20)["machine.shm"].cause
    assert "--shm-size" in warnings(config, shared_free=64 << 20)["machine.shm"].fix
    assert "there is no /dev/shm" in warnings(config, shared_free=None)["machine.shm"].cause
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert not warnings(config, shared_free=64 << 20)


def test_few_open_files_are_a_warning(config: PPOConfig):
    assert "at most 1024 files" in warnings(config, open_files=1024)["machine.open-files"].cause


def test_a_container_that_may_use_fewer_cores_than_are_seen_is_a_warning(config: PPOConfig):
    told = warnings(config, limits=Limits(cores=2.5))["machine.cores"]
    assert "see 8 cores, and the container may use 2.5" in told.cause and told.fix.endswith("--cpuset-cpus=0-1")
    assert not warnings(config, limits=Limits(cores=8.0))


def test_a_container_s_limit_of_memory_counts_where_it_is_below_what_is_free(config: PPOConfig):
    assert "may take 1.0 GiB more" in warnings(config, limits=Limits(memory_free=GIB))["machine.memory"].cause
    assert not warnings(config, limits=Limits(memory_free=4 * GIB))  # information
    findings = Findings()
    check_machine(config, findings, replace(HEALTHY, limits=Limits(memory_free=128 * GIB)))
    assert [finding.code for finding in findings.found] == ["machine.found"]


def test_the_tightest_control_group_on_the_way_up_counts(tmp_path: Path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "memory.max").write_text("1000\n")
    (tmp_path / "a" / "b" / "memory.current").write_text("100\n")
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000\n")
    (tmp_path / "a" / "memory.max").write_text("1000\n")
    (tmp_path / "a" / "memory.current").write_text("900\n")
    (tmp_path / "a" / "memory.stat").write_text("anon 300\nfile 610\nactive_file 400\ninactive_file 200\nshmem 10\n")
    (tmp_path / "a" / "cpu.max").write_text("150000 100000\n")
    own = tmp_path / "own"
    own.write_text("1:name=systemd:/x\n0::/a/b\n")
    assert cgroup_limits(own, tmp_path) == Limits(700, 1.5)


@pytest.mark.parametrize("text", ["", "1:memory:/docker/x\n", "0::/\n"])
def test_without_limits_there_are_none(tmp_path: Path, text: str):
    (tmp_path / "own").write_text(text)
    assert cgroup_limits(tmp_path / "own", tmp_path) == Limits()
