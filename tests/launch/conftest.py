"""Files of launches, in a directory of their own."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hybridrl.launch.__main__ import main
from tests.launch.hosts import Cluster

Rendered = Callable[[str, Sequence[str], Sequence[str]], Path]


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    Path("hosts").write_text("host-a\nhost-b # the second\n\nhost-c\n")
    return tmp_path


@pytest.fixture
def rendered(directory: Path) -> Rendered:
    """Write the file of a launch, and return its path."""

    def write(engine: str, options: Sequence[str], words: Sequence[str]) -> Path:
        file = directory / f"{engine}-{time.monotonic_ns()}"
        assert main([engine, "--out", str(file), *options, "--", *words]) == 0
        return file

    return write


@pytest.fixture
def cluster(directory: Path) -> Cluster:
    return Cluster(directory, "host-a,host-b,host-c")
