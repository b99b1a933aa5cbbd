"""Reinforcement learning of language models: Ray places the processes, vLLM answers, FSDP2 trains.

Knows its version and its files, and imports nothing else of hybridrl: every part can be used without the rest.
"""

import os

__version__ = "0.1.0"

PACKAGE = os.path.dirname(os.path.abspath(__file__))


def project_file(path: str) -> str:
    """Return where a file of the project is, such as docs/errors.md: beside the package in a checkout, in it where a
    wheel is installed. The path is relative if it is below the working directory."""
    place = next((os.path.join(at, path) for at in (PACKAGE, os.path.dirname(PACKAGE)) if _holds(at, path)), path)
    relative = os.path.relpath(place)
    return place if relative.startswith(os.pardir) else relative


def _holds(directory: str, path: str) -> bool:
    return os.path.exists(os.path.join(directory, path.partition("#")[0]))
