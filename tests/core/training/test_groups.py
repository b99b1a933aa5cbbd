"""The time limit of collectives, on real ranks."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridrl.core import device as devices
from hybridrl.core.training.attention import sequence_group
from hybridrl.core.training.layout import layout
from hybridrl.core.training.state import StateWriter
from tests.core.training.on_ranks import on_ranks

LIMIT = 2.0


def limits_and_a_late_rank() -> tuple[list[float], float]:
    """Return the limit of every group that a training rank can have, and how long the first rank waits for a late one
    in the group of replicas."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    listener = devices.listen("127.0.0.1") if rank == 0 else None
    port = [listener.getsockname()[1] if listener else 0]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    devices.join_group("cpu", f"127.0.0.1:{port[0]}", listener, rank, ranks, LIMIT)
    grid, writer, sharing = layout("cpu", ranks, 1).dense, StateWriter("cpu"), sequence_group(ranks, LIMIT)
    groups: list[Any] = [dist.group.WORLD, *grid.get_all_groups(), writer.group, sharing]
    limits = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    began = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            dist.all_reduce(torch.zeros(1), group=grid.get_group("replicate"))
    else:
        time.sleep(2 * LIMIT)
    return limits, time.monotonic() - began


def test_every_group_has_the_configured_limit_and_a_late_rank_is_an_error_then():
    (limits, waited), (others, _) = on_ranks(2, limits_and_a_late_rank)
    assert limits == others == [LIMIT] * 5
    assert LIMIT <= waited < 2 * LIMIT
