"""Ports of process groups."""

import socket

import pytest

from hybridrl import device as devices


def test_ports_are_chosen_by_the_system_and_held_until_a_group_has_them():
    first, second = devices.listen("127.0.0.1"), devices.listen("127.0.0.1")
    ports = [one.getsockname()[1] for one in (first, second)]
    with first, second, pytest.raises(OSError, match="in use"):
        assert ports[0] != ports[1]
        socket.create_server(("127.0.0.1", ports[0])).close()
