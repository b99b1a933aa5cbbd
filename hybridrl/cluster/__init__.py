"""Ray: joining or starting it, placing actors on devices, calling them with deadlines. Knows no model."""

from hybridrl.cluster.group import Actor, Group, Pending, RemoteFailure, WorkerDied, gather, kill, spawn
from hybridrl.cluster.session import RaySession

__all__ = ["Actor", "Group", "Pending", "RaySession", "RemoteFailure", "WorkerDied", "gather", "kill", "spawn"]
