from dataclasses import dataclass

import pynvml
import pytest

from hybridrl.config import ConfigError
from hybridrl.config.checks.training import this_machine


@dataclass
class Driver:
    """A stand-in for NVML with so many GPUs, or one that is not responding."""

    gpus: int = 0
    broken: bool = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pynvml, "nvmlInit", self.init)
        monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: self.gpus)

    def init(self) -> None:
        if self.broken:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)


@pytest.mark.parametrize(("visible", "gpus"), [(None, 4), ("0,1", 2), ("3", 1), ("", 0), ("-1", 0), ("0,1,2,3,4,5", 4)])
def test_gpus_are_counted_as_far_as_they_are_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gpus: int
) -> None:
    Driver(gpus=4).install(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert this_machine().gpus == gpus


def test_a_broken_driver_is_rejected_unless_no_gpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(broken=True).install(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(ConfigError, match="is not responding"):
        this_machine()
    assert this_machine(count_gpus=False).gpus == 0
