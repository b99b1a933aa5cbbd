"""Reinforcement learning of language models: Ray places the processes, vLLM answers, FSDP2 trains.

Knows its version and its files, and imports nothing else of hybridrl until it is used: `from hybridrl import train`.
"""

import os
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridrl.api import Run, train

__all__ = ["Run", "train"]
__version__ = "0.1.0"

PACKAGE = os.path.dirname(os.path.abspath(__file__))


def project_file(path: str) -> str:
    """Return where a file of the project is, such as docs/errors.md: next to the package in a checkout, in it where a
    wheel is installed. The path is relative if it is below the working directory."""
    place = next((os.path.join(at, path) for at in (PACKAGE, os.path.dirname(PACKAGE)) if _holds(at, path)), path)
    relative = os.path.relpath(place)
    return place if relative.startswith(os.pardir) else relative


def __getattr__(name: str) -> Any:
    """Import what is used from Python only then: commands import this package, too."""
    if name in __all__:
        return pkgutil.resolve_name(f"hybridrl.api:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _holds(directory: str, path: str) -> bool:
    return os.path.exists(os.path.join(directory, path.partition("#")[0]))
