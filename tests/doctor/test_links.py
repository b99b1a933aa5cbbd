"""Links between machines: the pairs that are measured, and those that are odd; without a network."""

from hypothesis import given
from hypothesis import strategies as st

from hybridrl.config.findings import Findings
from hybridrl.doctor.links import EVERY_PAIR, Link, is_odd, measure_link, pairs_of, report_links, usual_link

FAST, SLOW, LATE = Link(0.1, 2.0), Link(0.1, 0.5), Link(20.0, 2.0)


@given(st.integers(1, 40))
def test_pairs_are_all_or_of_many_machines_some_of_each(machines: int):
    pairs = pairs_of(machines)
    assert len({*pairs}) == len(pairs) and all(0 <= first < second < machines for first, second in pairs)
    if machines <= EVERY_PAIR:
        assert len(pairs) == machines * (machines - 1) // 2
    else:
        assert len(pairs) <= machines * 6 // 2 and {machine for pair in pairs for machine in pair} == {*range(machines)}


def odd(links: dict[tuple[int, int], Link]) -> list[tuple[int, int]]:
    return [pair for pair, link in links.items() if is_odd(link, usual_link(links))]


def test_a_slow_link_and_each_link_of_a_slow_machine_are_odd():
    assert odd({(0, 1): FAST, (0, 2): FAST, (1, 2): FAST}) == []
    assert odd({(0, 1): FAST, (0, 2): FAST, (1, 2): SLOW}) == [(1, 2)]
    assert odd({(0, 1): FAST, (0, 2): LATE, (1, 2): LATE}) == [(0, 2), (1, 2)]


def test_of_two_machines_no_link_is_odd_and_schedulers_are_not_reported():
    assert odd({(0, 1): SLOW}) == []
    assert odd({(0, 1): FAST, (0, 2): FAST, (1, 2): Link(0.9, 0.7)}) == []


def test_an_odd_link_is_named_with_its_figures_and_the_usual():
    findings = Findings()
    report_links(["a", "b", "c"], {(0, 1): FAST, (0, 2): FAST, (1, 2): SLOW}, findings)
    summary, warning = findings.items
    assert summary.cause == "usually 2 GB/s and 0.1 ms between two machines; slowest 0.5 GB/s and 0.1 ms, b to c"
    assert (
        warning.cause == "b to c: 0.5 GB/s and 0.1 ms, where 2 GB/s and 0.1 ms are usual" and "ethtool" in warning.fix
    )


def test_a_link_that_is_slow_is_measured_with_little_data():
    sizes = []

    def at_speed(bytes_per_second: float):
        def seconds(size: int) -> float:
            sizes.append(size)
            return 0.001 + size / bytes_per_second

        return seconds

    link = measure_link(at_speed(1e9))
    assert round(link.milliseconds, 3) == 1 and 0.95 < link.bandwidth < 1 and max(sizes) == 64 << 20
    sizes.clear()
    assert 0.0009 < measure_link(at_speed(1e6)).bandwidth < 0.001 and max(sizes) == 1 << 20
