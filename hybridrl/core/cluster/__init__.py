"""Ray: joining or starting it, placing actors on devices, calling them with deadlines. Does not know models."""

from hybridrl.core.cluster.failures import OutOfMemory, RemoteFailure, WorkerDied, cause
from hybridrl.core.cluster.group import Actor, Group, Pending, gather, kill, spawn
from hybridrl.core.cluster.session import RaySession

__all__ = [
    "Actor", "Group", "OutOfMemory", "Pending", "RaySession", "RemoteFailure", "WorkerDied", "cause", "gather", "kill",
    "spawn",
]  # fmt: skip
