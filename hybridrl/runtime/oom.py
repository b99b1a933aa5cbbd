"""Who killed a process: the kernel counts those that it ended for lack of memory, and says so to everyone."""

from pathlib import Path

COUNTS = Path("/proc/vmstat")


def _count() -> int | None:
    """Processes of this machine that the kernel killed for lack of memory since it was started; None where unknown."""
    try:
        counts = dict(line.split() for line in COUNTS.read_text().splitlines())
    except OSError:
        return None
    return int(counts["oom_kill"]) if "oom_kill" in counts else None


_BEFORE = _count()  # when the run began


def killer() -> str:
    """The words after "killed" for a process of this machine that got signal 9."""
    now = _count()
    if now is None or _BEFORE is None:
        return "by hand, or by the kernel for lack of memory (see dmesg)"
    if now == _BEFORE:
        return "by hand or by a scheduler: the kernel has killed nothing here for lack of memory since the run began"
    killed = now - _BEFORE
    return f"by the kernel for lack of memory: it has killed {killed} of this machine's processes since the run began"
