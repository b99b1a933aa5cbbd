from dataclasses import dataclass

import pynvml
import pytest

from hybridrl.config import ConfigError, load_ppo_config
from hybridrl.config.checks.training import this_machine


@dataclass
class Driver:
    """A stand-in for NVML with so many GPUs, or one that is not responding."""

    gpus: int = 0
    broken: bool = False
    missing: bool = False

    NVMLError, NVMLError_LibraryNotFound = pynvml.NVMLError, pynvml.NVMLError_LibraryNotFound

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hybridrl.config.checks.training.pynvml", self)

    def nvmlDeviceGetCount(self) -> int:
        return self.gpus

    def nvmlShutdown(self) -> None: ...

    def nvmlInit(self) -> None:
        if self.missing:
            raise pynvml.NVMLError_LibraryNotFound
        if self.broken:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)


@pytest.mark.parametrize(("visible", "gpus"), [(None, 4), ("0,1", 2), ("3", 1), ("", 0), ("-1", 0), ("0,1,2,3,4,5", 4)])
def test_gpus_are_counted_as_far_as_they_are_visible(monkeypatch, visible, gpus):
    Driver(gpus=4).install(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert this_machine().gpus == gpus


def test_a_broken_driver_is_rejected_unless_no_gpu_is_asked_for(monkeypatch):
    Driver(broken=True).install(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(ConfigError, match="is not responding"):
        this_machine()
    assert this_machine(count_gpus=False).gpus == 0


@pytest.mark.parametrize(
    ("visible", "driver", "why", "fix"),
    [
        ("", Driver(gpus=4), "CUDA_VISIBLE_DEVICES= hides them", "unset it, or set trainer.device=cpu"),
        (None, Driver(gpus=0), "the NVIDIA driver finds none", "see nvidia-smi -L, or set"),
        (None, Driver(missing=True), "there is no NVIDIA driver", "install it (in a container: docker run --gpus all)"),
    ],
)
def test_the_reasons_for_a_missing_gpu_are_told_apart(monkeypatch, visible, driver, why, fix):
    driver.install(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError) as error:
        load_ppo_config(["data.train_files=a/b", "actor_rollout_ref.model.path=a/b", "trainer.device=cuda"])
    (line,) = (line for line in error.value.lines if "GPU" in line)
    assert line.startswith(f"trainer.device=cuda: this machine has no usable GPU: {why}; {fix}")


def test_more_devices_than_cores_are_warned_of(load, cores):
    cores(2)
    (note,) = [note for note in load("trainer.device=cpu", "trainer.n_gpus_per_node=3").notes if "cores" in note]
    assert note.endswith("set trainer.n_gpus_per_node=2")
    assert not [note for note in load("trainer.device=cpu", "trainer.n_gpus_per_node=2").notes if "cores" in note]
