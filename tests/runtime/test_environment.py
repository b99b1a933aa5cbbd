"""The environment in which workers and engines are started."""

import json
import os
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from importlib.util import module_from_spec
from pathlib import Path

import pytest

from hybridrl.config import ConfigError
from hybridrl.runtime import environment
from hybridrl.runtime.environment import CACHES, reject_foreign_builds, worker_environment

FAULTS = """
import resource, torch
torch.set_num_threads(1)
def write():
    torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
write(), write()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
write()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_on_cpu_the_memory_of_a_large_tensor_is_reused_without_page_faults() -> None:
    """64 MiB are 16,384 pages, each a fault when the system has to provide it again."""
    environment = os.environ | worker_environment("cpu", slots=1)
    result = subprocess.run([sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, check=True)
    assert int(result.stdout) < 1000


def test_a_preloaded_allocator_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libtcmalloc_minimal.so.4")
    assert "LD_PRELOAD" not in worker_environment("cpu", slots=1)


def test_other_preloaded_libraries_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libgomp.so.1")
    assert worker_environment("cpu", slots=1)["LD_PRELOAD"].split()[1:] == ["/usr/lib/libgomp.so.1"]


def test_custom_allocator_options_come_last_and_take_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_CONF", "dirty_decay_ms:500")
    assert worker_environment("cpu", slots=1)["MALLOC_CONF"].endswith(",dirty_decay_ms:500")


@pytest.mark.parametrize("place", ["a place", "a:place"])
def test_an_allocator_whose_path_would_be_split_is_not_used(tmp_path, monkeypatch, place) -> None:
    library = tmp_path / place / "core" / "libjemalloc.so"
    library.parent.mkdir(parents=True)
    library.touch()
    found = ModuleSpec("ray", None, origin=str(tmp_path / place / "__init__.py"))
    monkeypatch.setitem(sys.modules, "ray", module_from_spec(found))
    assert "LD_PRELOAD" not in worker_environment("cpu", slots=1)


def test_on_cuda_the_system_allocator_is_used() -> None:
    assert "LD_PRELOAD" not in worker_environment("cuda", slots=1)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_on_cuda_segments_that_other_processes_cannot_open_are_not_used(monkeypatch: pytest.MonkeyPatch, name) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    assert worker_environment("cuda", slots=1)[name] == "max_split_size_mb:64"
    assert name not in worker_environment("cpu", slots=1)
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert name not in worker_environment("cuda", slots=1)


def test_slots_share_the_cores(cores) -> None:
    cores(8)
    assert worker_environment("cpu", slots=2)["OMP_NUM_THREADS"] == "4"
    assert worker_environment("cpu", slots=16)["OMP_NUM_THREADS"] == "1"


HOMES = """
import json, os
from hybridrl.runtime.environment import CACHES, replace_unwritable_home
directory = replace_unwritable_home()
names = ["HOME", "HF_HOME", *CACHES]
print(json.dumps({"directory": directory} | {name: os.environ.get(name) for name in names}))
"""


def home_as(home: Path, tmp_path: Path, *wrapper: str, **more: str) -> dict[str, str]:
    """The variables of a process with this home, without the rights of root if it has them."""
    if os.getuid() == 0:
        wrapper = (shutil.which("setpriv") or pytest.skip("root can write everywhere"),)
        wrapper += ("--bounding-set=-dac_override,-dac_read_search",)
    known = {name: value for name, value in os.environ.items() if name not in CACHES}
    environment = known | {"HOME": str(home), "TMPDIR": str(tmp_path)} | more
    command = [*wrapper, sys.executable, "-c", HOMES]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def test_caches_are_private_where_the_home_cannot_be_written(tmp_path: Path) -> None:
    home = tmp_path / "home"
    models = home / ".cache" / "huggingface"
    models.mkdir(parents=True)
    assert home_as(home, tmp_path)["directory"] == ""
    for path in (models, home / ".cache"):
        path.chmod(0o555)
    known = home_as(home, tmp_path)  # a cache that root made
    assert Path(known["directory"]).stat().st_mode & 0o777 == 0o700
    assert (known["HOME"], known["HF_HOME"]) == (str(home), str(models))
    assert {known[name] for name in CACHES} == {f"{known['directory']}/{place}" for place in CACHES.values()}
    (home / ".cache").chmod(0o755)
    home.chmod(0o555)
    assert home_as(home, tmp_path, MPLCONFIGDIR=str(tmp_path))["MPLCONFIGDIR"] == str(tmp_path)
    missing = home_as(tmp_path / "none", tmp_path)
    assert missing["HOME"] == missing["directory"] == known["directory"]
    home.chmod(0o755)


def test_a_directory_of_another_user_is_not_used(tmp_path: Path) -> None:
    (tmp_path / f"hybridrl_home_{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"hybridrl_home_{os.getuid()}").chmod(0o777)
    known = home_as(tmp_path / "none", tmp_path)
    assert Path(known["directory"]).name != f"hybridrl_home_{os.getuid()}"
    assert Path(known["directory"]).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("torch", "torchvision", "machine", "repaired", "said"),
    [
        ("2.13.0+cpu", "0.28.0", "x86_64", True, "torchcodec 0.17: built for CUDA, and torch 2.13.0+cpu"),
        ("2.13.0+cpu", "0.28.0", "x86_64", False, "torchvision 0.28.0, torchcodec 0.17: built for CUDA, and torch"),
        ("2.13.0+cpu", "0.28.0+cpu", "x86_64", False, "torchcodec 0.17: built for CUDA"),
        ("2.13.0+cpu", "0.28.0", "aarch64", False, ""),  # where the index has builds for CPUs
        ("2.13.0", "0.28.0", "x86_64", False, ""),
        ("", "0.28.0", "x86_64", False, ""),
    ],
)
def test_builds_for_cuda_beside_a_torch_for_cpus_are_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch, torch: str, torchvision: str, machine: str, repaired: bool, said: str
) -> None:
    """`repaired`: hybridrl_torchvision makes torchvision importable."""
    monkeypatch.setitem(sys.modules, "hybridrl_torchvision", environment)
    if not repaired:
        del sys.modules["hybridrl_torchvision"]
    installed = {"torch": torch, "torchvision": torchvision, "torchcodec": "0.17"}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError
        return installed[name]

    monkeypatch.setattr(environment, "version", version)
    if not said:
        return reject_foreign_builds(machine)
    with pytest.raises(ConfigError) as error:
        reject_foreign_builds(machine)
    assert str(error.value).startswith(said)
    named = [name for name in ("torchvision", "torchcodec") if f"{name} 0" in said]
    assert f"pip uninstall -y {' '.join(named)} " in str(error.value)
