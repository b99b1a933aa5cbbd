"""Memory of this machine: what a control group leaves, and what the kernel has killed for lack of it."""

from pathlib import Path

import psutil

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
KERNEL_COUNTS = Path("/proc/vmstat")


def memory_left() -> int:
    """Return the bytes that processes may still allocate on the machine or in the container."""
    free, (limit, _) = psutil.virtual_memory().available, cgroup_limits()
    return free if limit is None else min(free, limit)


def cgroup_limits(own: Path = OWN_CGROUP, mount: Path = CGROUPS) -> tuple[int | None, float | None]:
    """Return the bytes that this process's control group and its parents (version 2) leave it, and its cores; None: no
    limit."""
    lines = own.read_text().splitlines() if own.is_file() else []
    group = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    memory, cores = [], []
    for directory in (mount / group, *(mount / parent for parent in Path(group).parents)) if group is not None else ():
        files = [directory / name for name in ("memory.max", "memory.current", "cpu.max", "memory.stat")]
        most, used, quota, stat = [file.read_text().split() if file.is_file() else [] for file in files]
        if most and used and most[0] != "max":
            sizes = dict(zip(stat[::2], map(int, stat[1::2]), strict=True))
            cached = sizes.get("active_file", 0) + sizes.get("inactive_file", 0)  # counted as used, and reclaimable
            memory.append(int(most[0]) - int(used[0]) + cached)
        if quota and quota[0] != "max":
            cores.append(int(quota[0]) / int(quota[1]))
    return min(memory, default=None), min(cores, default=None)


def oom_kills(counts: Path = KERNEL_COUNTS) -> int | None:
    """Return how many processes the kernel of this machine has killed for lack of memory, or None if unknown."""
    try:
        numbers = dict(line.split() for line in counts.read_text().splitlines())
    except OSError:
        return None
    return int(numbers["oom_kill"]) if "oom_kill" in numbers else None


def memory_now() -> dict[str, int | None]:
    """Return the bytes that this process holds, that the machine has left and that its control group leaves, and the
    kernel's count of kills; None: no limit, or not known."""
    return {
        "rss": psutil.Process().memory_info().rss,
        "available": psutil.virtual_memory().available,
        "cgroup_left": cgroup_limits()[0],
        "oom_kills": oom_kills(),
    }
