"""Silence explained: which ranks have not responded to a call for longer than usual, and what they are doing."""

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridrl.runtime.stacks import activities
from hybridrl.tracking.console import info, warn

SILENT_SECONDS = 45.0  # without a response or a token, after which it is reported: explained within a minute
TIMES_USUAL = 5  # of the median duration of the call, if that is longer
REPLY_SECONDS = 15.0  # of the other machines

durations: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=100))  # of the calls of this run, by name


class Watch:
    """A call to several ranks that is waited for. Reports those that are silent, each time after twice as long."""

    def __init__(self, call: str, logs: Sequence[str]) -> None:
        self.call, self.logs = call, logs
        self.began = time.monotonic()
        past = list(durations[call])
        self.usual = median(past) if past else None
        self.due = max(SILENT_SECONDS, TIMES_USUAL * (self.usual or 0))

    def look(self, silent: Sequence[int]) -> None:
        """Report these ranks if it is time to."""
        seconds = time.monotonic() - self.began
        if seconds < self.due:
            return
        self.due = 2 * seconds
        report, usual = (info, "the first such call") if self.usual is None else (warn, f"usually {self.usual:.3g} s")
        head = f"{self.call}: {len(silent)} not done after {seconds:.0f} s ({usual}); still waiting"
        report("\n".join([head, *table(silent, self.logs)]))

    def end(self) -> None:
        durations[self.call].append(time.monotonic() - self.began)


def table(ranks: Sequence[int], logs: Sequence[str]) -> list[str]:
    """Return a line for each rank that has a log, with what it is doing; its stacks are then in the log."""
    found = explain([logs[rank] for rank in ranks if rank < len(logs)])
    return [f"  {name(rank, logs)}: {found[logs[rank]]}; its log: {logs[rank]}" for rank in ranks if rank < len(logs)]


def name(rank: int, logs: Sequence[str]) -> str:
    """Return the name of an actor, which its log file has as well, such as rollout-1."""
    return Path(logs[rank]).stem if rank < len(logs) else f"rank {rank}"


def explain(logs: Sequence[str]) -> dict[str, str]:
    """Return what the processes that write to each log are doing, on whatever machine of the run they are."""
    found = activities(logs)
    if missing := [log for log in logs if log not in found]:
        with suppress(RayError):  # Ray is lost
            for reply in _ask_others(missing):
                with suppress(RayError):  # the machine is lost
                    found |= ray.get(reply)
    return {log: found.get(log, "it has no process yet, or its machine does not respond") for log in logs}


def _ask_others(missing: Sequence[str]) -> list[ray.ObjectRef]:
    """Ask all other machines for the activities of the processes that write to these logs; return those that reply."""
    here = ray.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    asking = ray.remote(num_cpus=0)(activities)
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in others]
    asked = [asking.options(scheduling_strategy=place).remote(missing) for place in places]
    return ray.wait(asked, num_returns=len(asked), timeout=REPLY_SECONDS)[0] if asked else []
