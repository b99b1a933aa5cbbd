"""Ray: joining or starting it, placing actors on devices, calling them with deadlines. Independent of models.

Every call has a time limit, and silent processes are reported, with what they are doing, long before it. On a single
machine Ray requires its token and listens on the loopback only; a joined cluster keeps its setup. On CPU actors are
forked from a process that has already imported torch and vLLM.
"""

from hybridrl.core.cluster.failures import OutOfMemory, RemoteFailure, WorkerDied, cause
from hybridrl.core.cluster.group import Actor, Group, Pending, gather, kill, spawn
from hybridrl.core.cluster.session import RaySession

__all__ = [
    "Actor", "Group", "OutOfMemory", "Pending", "RaySession", "RemoteFailure", "WorkerDied", "cause", "gather", "kill",
    "spawn",
]  # fmt: skip
