"""Links between pairs of machines: their measurement, and which of many are odd."""

import socket
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from hybridrl.config.findings import Findings

SUMS, SMALL_BYTES, LARGE_BYTES = 20, 1 << 20, 64 << 20
SLOW_SECONDS, LINK_SECONDS = 0.1, 30.0  # a small sum that takes longer is the last; limit of all sums
EVERY_PAIR = 16  # up to this number of machines
ODD, ODD_MILLISECONDS = 3, 1.0  # times the usual; schedulers alone cause differences below a millisecond
FIX = "compare port, cable and driver with those of the others (ethtool), or leave the machine out"
Pair = tuple[int, int]  # machines by number


class Link(NamedTuple):
    """The speed of an all-reduce of two machines: milliseconds of a number, and GB/s of 64 MiB."""

    milliseconds: float
    bandwidth: float

    def __str__(self) -> str:
        return f"{self.bandwidth:.2g} GB/s and {self.milliseconds:.2g} ms"


def measure_link(seconds_of_sum: Callable[[int], float]) -> Link:
    """Measure the sum over two machines; the function sums a number of bytes and returns the seconds that it took."""
    milliseconds = 1000 * min(seconds_of_sum(4) for _ in range(SUMS))
    seconds, size = seconds_of_sum(SMALL_BYTES), SMALL_BYTES
    if seconds < SLOW_SECONDS:
        seconds, size = seconds_of_sum(LARGE_BYTES), LARGE_BYTES
    return Link(milliseconds, size / 1e9 / seconds)


def reach(host: str, port: int, seconds: float = 5.0) -> str:
    """Return why no connection to a port of another machine can be made; empty if it can."""
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except OSError as error:
        return f"{host}:{port} ({error})"
    return ""


def pairs_of(machines: int) -> list[Pair]:
    """Return the pairs to measure: all, or of many machines each with those whose number differs in one bit. A slow
    machine is seen then too; a single slow link may not be."""
    bits = (machines - 1).bit_length()
    masks = range(1, 1 << bits) if machines <= EVERY_PAIR else [1 << bit for bit in range(bits)]
    return [(first, first ^ mask) for mask in masks for first in range(machines) if first < first ^ mask < machines]


def is_odd(link: Link, usual: Link) -> bool:
    """Whether a link has less than a third of the usual bandwidth, or more than three times the usual latency."""
    late = max(ODD * usual.milliseconds, usual.milliseconds + ODD_MILLISECONDS)
    return link.bandwidth < usual.bandwidth / ODD or link.milliseconds > late


def usual_link(links: Mapping[Pair, Link]) -> Link:
    """Return the median of the machines, each at its best: of three machines, a slow one has two of three links."""
    machines = {machine for pair in links for machine in pair}
    of_machine = [[link for pair, link in links.items() if machine in pair] for machine in machines]
    best = [(min(link.milliseconds for link in each), max(link.bandwidth for link in each)) for each in of_machine]
    return Link(*map(median, zip(*best, strict=True)))


def report_links(names: Sequence[str], links: Mapping[Pair, Link], findings: Findings) -> None:
    """Report usual and odd links. `names` are those of the machines."""
    if not links:
        return
    usual, slowest = usual_link(links), min(links, key=lambda pair: links[pair].bandwidth)
    ends = " to ".join(names[machine] for machine in slowest)
    findings.info("cluster.links", f"usually {usual} between two machines; slowest {links[slowest]}, {ends}")
    for (first, second), link in links.items():
        if is_odd(link, usual):
            findings.warn("cluster.link", f"{names[first]} to {names[second]}: {link}, where {usual} are usual", FIX)
