"""The GPUs of engines where no trainer uses them: one small actor each, so that Ray counts them as in use."""

import ray

from hybridrl.core.cluster.group import START_LIMIT, Actor, gather, spawn
from hybridrl.core.cluster.session import RaySession


class DeviceHolder:
    """What Ray counts as the user of a device, whose GPU an engine gets by its number."""

    def renew(self) -> None:
        """Hold it for the engine of another run, too."""

    def gpus(self) -> list[str]:
        return [str(number) for number in ray.get_gpu_ids()]


def hold_devices(session: RaySession, timeout: float) -> tuple[list[Actor], list[list[str]]]:
    """Return the actors that hold the devices for rollout as long as they are referenced, and the GPUs of each device:
    none on CPU, where nothing is held."""
    pool = session.rollout
    if session.device != "cuda":
        return [], [[] for _ in range(pool.devices)]
    holders = [spawn(DeviceHolder, session, pool.first + index, {}, gpus=1) for index in range(pool.devices)]
    return holders, gather([one.gpus.remote() for one in holders], "device holder.gpus", timeout, key=START_LIMIT)
