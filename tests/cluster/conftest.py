"""A Ray of several machines, all of them on this one, which runs join."""

import shutil
import tempfile
from collections.abc import Iterator

import pytest
from ray._raylet import Config
from ray.cluster_utils import Cluster


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Cluster]:
    """A cluster of two machines with two CPUs each, which RAY_ADDRESS names."""
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Ray's sockets need a short path
    options = {"num_cpus": 2, "include_dashboard": False, "temp_dir": directory}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # these machines have no token, which the session would send
        Config.initialize("")
        cluster = Cluster(initialize_head=True, head_node_args=options)
        cluster.add_node(num_cpus=2)
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        cluster.shutdown()
    shutil.rmtree(directory, ignore_errors=True)
