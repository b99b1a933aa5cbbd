"""The size and checksum of every file below a directory, by which damage is found and named.

Knows nothing of what the files hold.
"""

import json
import zlib
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_CHUNK = 1 << 20


def write_manifest(directory: Path) -> None:
    """Write down what lies below a directory now."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / MANIFEST)
    files = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "crc32": _crc32(path)} for path in paths
    }
    (directory / MANIFEST).write_text(_text(files), encoding="utf-8")


def faults(directory: Path, below: str = "") -> list[str]:
    """Each file that is missing, truncated, changed or unreadable, in words; a file not written down is no fault. Only
    those of which the name begins with `below`."""
    try:
        files = _read(directory)
    except ValueError as error:
        return [f"{MANIFEST}: {error}"]
    checked = {name: entry for name, entry in files.items() if name.startswith(below)}
    wrong = ((name, _fault(directory / name, entry)) for name, entry in checked.items())
    return [f"{name}: {fault}" for name, fault in wrong if fault]


def is_intact(directory: Path, name: str) -> bool:
    """Whether one file is as it was written down."""
    try:
        entry = _read(directory).get(name)
    except ValueError:
        return False
    return entry is not None and _fault(directory / name, entry) is None


def _read(directory: Path) -> dict[str, dict[str, Any]]:
    """What was written down of each file. Raises ValueError, which says what is wrong with the manifest itself."""
    try:
        text = (directory / MANIFEST).read_text(encoding="utf-8")
        found = json.loads(text)
    except FileNotFoundError:
        raise ValueError("missing") from None
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error
    except ValueError:
        raise ValueError("damaged") from None
    # Its own checksum too: a name damaged there would otherwise accuse a file.
    if not isinstance(found, dict) or text != _text(found.get("files")):
        raise ValueError("damaged")
    return found["files"]


def _text(files: object) -> str:
    body = json.dumps(files, indent=1, sort_keys=True)
    return f'{{"crc32": "{zlib.crc32(body.encode()):08x}",\n"files": {body}}}\n'


def _fault(path: Path, entry: dict[str, Any]) -> str | None:
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{size} of {entry['bytes']} bytes"
        return None if _crc32(path) == entry["crc32"] else "changed since it was written"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _crc32(path: Path) -> str:
    # On a core of an AMD EPYC, crc32 takes 4.3 GB/s and blake2b 0.9; it is accidents that are looked for, not malice.
    buffer, checksum = memoryview(bytearray(_CHUNK)), 0
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            checksum = zlib.crc32(buffer[:size], checksum)
    return f"{checksum:08x}"
