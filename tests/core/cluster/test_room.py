"""A joined Ray that has no room, without Ray: what is said and when, and that what was reserved is released."""

from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.config import ConfigError
from hybridrl.core.cluster import session as module
from hybridrl.core.cluster.session import RayMachine, RaySession


class Group:
    """Stands in for a placement group, which is ready or waits."""

    def __init__(self, node_id: str | None, ready: bool) -> None:
        self.node_id, self.is_ready = node_id, ready

    def ready(self) -> "Group":
        return self


class FakeRay:
    """Stands in for Ray: of the groups requested, the first `room` become ready."""

    def __init__(self, room: int) -> None:
        self.room, self.groups, self.removed = room, [], []

    def placement_group(self, bundles: list, strategy: str, name: str, _soft_target_node_id: str | None) -> Group:
        self.groups.append(Group(_soft_target_node_id, len(self.groups) < self.room))
        return self.groups[-1]

    def wait(self, groups: list[Group], num_returns: int, timeout: float) -> tuple[list[Group], list[Group]]:
        return [one for one in groups if one.is_ready], [one for one in groups if not one.is_ready]

    def shutdown(self) -> None:
        pass


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """A Ray of two machines with room for one group; reports follow one another at once."""
    made = FakeRay(room=1)
    gpus = {"GPU": 8.0, "CPU": 64.0}
    machines = [RayMachine(name, name, gpus, gpus | {"GPU": free}) for name, free in (("a", 0.0), ("b", 3.0))]
    replaced: dict[str, Any] = {
        "ray": SimpleNamespace(wait=made.wait, shutdown=made.shutdown),
        "placement_group": made.placement_group,
        "remove_placement_group": made.removed.append,
        "placement_group_table": lambda group: {"bundles_to_node_id": {0: group.node_id}},
        "read_machines": lambda: machines,
        "join_command": lambda: "ray start --address=a:6379",
        "start_ray": lambda *_: None,
        "POLL_SECONDS": 0.01,
        "REPORT_SECONDS": 0.05,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setenv("RAY_ADDRESS", "a:6379")
    return made


def test_what_is_waited_for_is_said_at_once_and_repeatedly_and_in_the_end_all_is_released(ray: FakeRay, capsys):
    with pytest.raises(ConfigError, match=r"no room within 0.3 s for trainer.nnodes=3 x .*=4 on cuda; lower them"):
        RaySession("cuda", 3, 4, {}, 0.3)
    reports = capsys.readouterr().out.split("waiting for Ray, up to trainer.startup_timeout=0.3 s: ")[1:]
    assert len(reports) >= 2
    assert reports[0].splitlines() == [
        "1 of 3 machine(s) reserved, 2 in Ray:",
        "  a  GPUs: 4 requested, 8 in total, 0 free; CPUs: 4 requested, 64 in total, 64 free",
        "  b  GPUs: 4 requested, 8 in total, 3 free; CPUs: 4 requested, 64 in total, 64 free",
        "  machine 3 of 3 is missing",
        "  to add a machine: ray start --address=a:6379",
    ]
    assert ray.removed == ray.groups and len(ray.groups) == 3


def test_virtual_devices_of_each_machine_are_reserved_on_another_one(ray: FakeRay):
    ray.room = 2
    session = RaySession("cpu", 2, 4, {}, 1)
    assert [group.node_id for group in ray.groups] == ["a", "b"]
    session.close()
    assert ray.removed == ray.groups
    with pytest.raises(ConfigError):
        RaySession("cpu", 3, 4, {}, 0.1)
    assert len(ray.groups) == 4, "the third is requested once a third machine is there"
