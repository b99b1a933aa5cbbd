"""Links between pairs of machines: their measurement, and which of many are odd."""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from hybridrl.config.findings import Findings

LINK_BYTES, SUMS = (1 << 20, 64 << 20), 20
SLOW_SECONDS, LINK_SECONDS = 0.1, 30.0  # the second size is not tried if the first takes longer; limit of all sums
EVERY_PAIR = 16  # up to this number of machines
ODD, ODD_MILLISECONDS = 3, 1.0  # times the usual; schedulers alone cause differences below a millisecond
CABLE = "compare port, cable and driver with those of the others (ethtool), or leave the machine out"
Pair = tuple[int, int]  # machines by number


class Link(NamedTuple):
    """The speed of an all-reduce of two machines: milliseconds of a number, and GB/s of 64 MiB."""

    milliseconds: float
    bandwidth: float

    def __str__(self) -> str:
        return f"{self.bandwidth:.2g} GB/s and {self.milliseconds:.2g} ms"

    def best(self, other: "Link | None") -> "Link":
        """Return the better figures of two measurements."""
        if other is None:
            return self
        return Link(min(self.milliseconds, other.milliseconds), max(self.bandwidth, other.bandwidth))


def measure_link(seconds_of_sum: Callable[[int], float]) -> Link:
    """Measure the sum over two machines; the function sums a number of bytes and returns the seconds that it took."""
    milliseconds, bandwidth = 1000 * min(seconds_of_sum(4) for _ in range(SUMS)), 0.0
    for size in LINK_BYTES:
        seconds = seconds_of_sum(size)
        bandwidth = size / 1e9 / seconds
        if seconds > SLOW_SECONDS:
            break
    return Link(milliseconds, bandwidth)


def reach(host: str, port: int, seconds: float = 5.0) -> str:
    """Return why no connection to a port of another machine can be made; empty if it can."""
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except OSError as error:
        return f"{host}:{port} ({error})"
    return ""


def rounds(machines: int) -> Iterator[list[Pair]]:
    """Yield the pairs that are measured at the same time, each machine in one of them. These are all pairs; of many
    machines, each with log2 of their number, so that a slow machine is seen and a single slow link may not be."""
    bits = (machines - 1).bit_length()
    for mask in range(1, 1 << bits) if machines <= EVERY_PAIR else (1 << bit for bit in range(bits)):
        yield [(first, first ^ mask) for first in range(machines) if first < first ^ mask < machines]


def odd_links(links: Mapping[Pair, Link]) -> dict[Pair, Link]:
    """Return the links with less than a third of the usual bandwidth, or more than three times the usual latency."""
    if not links:
        return {}
    limit = _usual(links)
    slow = max(ODD * limit.milliseconds, limit.milliseconds + ODD_MILLISECONDS)
    return {
        pair: link for pair, link in links.items() if link.bandwidth < limit.bandwidth / ODD or link.milliseconds > slow
    }


def _usual(links: Mapping[Pair, Link]) -> Link:
    """Return the median of the machines, each at its best: of three machines, a slow one has two of three links."""
    machines = {machine for pair in links for machine in pair}
    of_machine = [[link for pair, link in links.items() if machine in pair] for machine in machines]
    best = [(min(link.milliseconds for link in each), max(link.bandwidth for link in each)) for each in of_machine]
    return Link(*map(median, zip(*best, strict=True)))


def report_links(names: Sequence[str], links: Mapping[Pair, Link], findings: Findings) -> None:
    """Report usual and odd links. `names` are those of the machines."""
    if not links:
        return
    slowest, usual = min(links, key=lambda pair: links[pair].bandwidth), _usual(links)
    ends = " to ".join(names[machine] for machine in slowest)
    findings.info("cluster.links", f"usually {usual} between two machines; slowest {links[slowest]}, {ends}")
    for (first, second), link in odd_links(links).items():
        cause = f"{names[first]} to {names[second]}: {link}, where {usual} are usual"
        findings.warn("cluster.link", cause, CABLE)
