"""Measure what the cluster check takes: `python scripts/benchmark/cluster_check.py [--nodes 2 4 8]`

Stand-in machines are nodes of a Ray on this one. A machine costs a process that imports torch, a pair of machines an
all-reduce of 64 MiB: the figures of three sizes give both, and with them those of 64 machines. Processor time is that
of everything that runs meanwhile, so that nothing else should.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
from ray._raylet import Config
from ray.cluster_utils import Cluster
from side_by_side import Arguments

from hybridrl.core.cluster.session import existing_ray, read_machines
from hybridrl.doctor.cluster import probe_machines
from hybridrl.doctor.links import pairs_of

FACED = 64  # machines


class Cost(NamedTuple):
    """Seconds of a check: wall-clock time, processor time of the driver and of everything."""

    wall: float
    driver: float
    total: float


def measure(nodes: int) -> Cost:
    """Check a cluster of stand-ins."""
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Ray's sockets need a short path
    options = {"num_cpus": 1, "include_dashboard": False, "temp_dir": directory}
    Path(directory, "ray").mkdir()
    os.environ["RAY_TMPDIR"] = directory  # the address is written there, where no Ray may ever have been
    cluster = Cluster(initialize_head=True, head_node_args=options)
    del os.environ["RAY_TMPDIR"]
    try:
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        with existing_ray({"address": cluster.address}):
            machines = read_machines()
            began, driver, total = time.monotonic(), time.process_time(), _processor_seconds()
            findings = probe_machines(machines, "cpu", Path(directory), {})
            assert not findings.errors, findings.errors
            return Cost(time.monotonic() - began, time.process_time() - driver, _processor_seconds() - total)
    finally:
        cluster.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def _processor_seconds() -> float:
    times = psutil.cpu_times()
    return times.user + times.system


def main() -> None:
    parser = Arguments(__doc__, nodes=[2])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8], help="sizes of the clusters")
    sizes = parser.parse_args().nodes
    os.environ |= {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(Path(__file__).parents[2])}
    Config.initialize("")
    costs = {nodes: measure(nodes) for nodes in sizes}
    for nodes, cost in costs.items():
        spent = f"{cost.wall:6.1f} s, driver {cost.driver:5.1f} s, all {cost.total:6.1f} s"
        print(f"{nodes:3} machines, {len(pairs_of(nodes)):3} pairs: {spent}")
    if len(sizes) >= 3:
        known = np.array([[1, nodes, len(pairs_of(nodes))] for nodes in sizes], float)
        for name, seconds in zip(Cost._fields, zip(*costs.values(), strict=True), strict=True):
            base, machine, pair = np.linalg.lstsq(known, np.array(seconds), rcond=None)[0]
            faced = base + FACED * machine + len(pairs_of(FACED)) * pair
            print(
                f"{name}: {base:.2f} + {machine:.2f} per machine + {pair:.3f} per pair; {FACED} machines: {faced:.0f} s"
            )


if __name__ == "__main__":
    main()
