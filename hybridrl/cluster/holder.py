"""The GPUs of a session where no trainer uses them: one small actor each, so that Ray counts them as in use."""

import ray

from hybridrl.cluster.group import START_LIMIT, Actor, gather, spawn
from hybridrl.cluster.session import RaySession


class DeviceHolder:
    """What Ray counts as the user of a device, whose GPU an engine gets by its number."""

    def gpus(self) -> list[str]:
        return [str(number) for number in ray.get_gpu_ids()]


def hold_devices(session: RaySession, timeout: float) -> tuple[list[Actor], list[list[str]]]:
    """Return the actors that hold all devices as long as they are referenced, and the GPUs of each device: none on
    CPU, where nothing is held."""
    count = len(session.groups) * session.per_machine
    if session.device != "cuda":
        return [], [[] for _ in range(count)]
    holders = [spawn(DeviceHolder, session, rank, {}, gpus=1) for rank in range(count)]
    return holders, gather([one.gpus.remote() for one in holders], "device holder.gpus", timeout, key=START_LIMIT)
