"""Ray: joining or starting it, placing actors on devices, calling them with deadlines. Does not know models.

Every call has a limit, and what is silent is named with its place long before. On a single machine Ray requires its
token and listens on the loopback only; a cluster that is joined keeps its setup. On CPU actors are forked from a
process that has imported torch and vLLM already.
"""

from hybridrl.core.cluster.failures import OutOfMemory, RemoteFailure, WorkerDied, cause
from hybridrl.core.cluster.group import Actor, Group, Pending, gather, kill, spawn
from hybridrl.core.cluster.session import RaySession

__all__ = [
    "Actor", "Group", "OutOfMemory", "Pending", "RaySession", "RemoteFailure", "WorkerDied", "cause", "gather", "kill",
    "spawn",
]  # fmt: skip
