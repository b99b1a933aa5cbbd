"""A Ray cluster whose machines are all on this one."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ray._raylet import Config
from ray.cluster_utils import Cluster

TOP = str(Path(__file__).parents[3])


@contextmanager
def two_machines(**second: str) -> Iterator[Cluster]:
    """Two machines with two CPUs each, which RAY_ADDRESS names; `second` has options of the second one."""
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Ray's sockets need a short path
    options = {"num_cpus": 2, "include_dashboard": False, "temp_dir": directory}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # these machines have no token, which the session would send
        patch.setenv("PYTHONPATH", TOP)
        Config.initialize("")
        with pytest.MonkeyPatch.context() as start:  # its address is written there, where no Ray may ever have been
            start.setenv("RAY_TMPDIR", directory)
            Path(directory, "ray").mkdir()
            cluster = Cluster(initialize_head=True, head_node_args=options)
        try:
            cluster.add_node(num_cpus=2, **second)
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(directory, ignore_errors=True)
