"""Ray: joining or starting it, placing actors on devices, calling them with deadlines. Knows no model."""

from hybridrl.cluster.group import Group, RemoteFailure, gather, spawn
from hybridrl.cluster.session import RaySession

__all__ = ["Group", "RaySession", "RemoteFailure", "gather", "spawn"]
