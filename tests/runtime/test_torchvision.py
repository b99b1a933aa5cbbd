"""torchvision next to a torch for CPUs, importable by hybridrl_torchvision.py. Stand-ins do what its import does."""

import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
# As torchvision 0.28: the compiled library defines the operators if it loads, and others then refer to them.
DEFINES = 'library = torch.library.Library("torchvision", "DEF"); library.define("nms(Tensor x) -> Tensor")\n'
REFERS = 'torch.library.register_fake("torchvision::nms")(lambda x: x)\n'
FOR_CPU, FOR_CUDA = DEFINES + REFERS, REFERS + REFERS.replace("nms", "qnms")
MISSING = "operator torchvision::nms does not exist"


@pytest.mark.parametrize(
    ("version", "code", "cuda", "finder", "error"),
    [
        ("0.28.0+cu130", FOR_CUDA, None, True, ""),
        ("0.28.0+cu130", FOR_CUDA, None, False, MISSING),
        ("0.28.0+cpu", FOR_CPU, None, True, ""),
        ("0.28.0+cu130", FOR_CPU, "13.0", True, ""),
        ("0.28.0+cpu", FOR_CUDA, None, True, MISSING),  # a fault of its own is not hidden
    ],
)
def test_torchvision_imports_beside_each_torch(
    tmp_path: Path, version: str, code: str, cuda: str | None, finder: bool, error: str
) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "version.py").write_text(f"__version__ = '{version}'\n")
    (tmp_path / "torchvision" / "__init__.py").write_text("import torch\n" + code)
    started = (
        f"import sys; sys.path[:0] = [{str(TOP)!r}, {str(tmp_path)!r}]; sys.modules.pop('hybridrl_torchvision', 0)\n"
    )
    started += "sys.meta_path[:] = [f for f in sys.meta_path if getattr(f, '__name__', '') != 'TorchvisionFinder']\n"
    started += "import hybridrl_torchvision\n" if finder else ""
    imported = f"import torch; torch.version.cuda = {cuda!r}; import torchvision"
    ended = subprocess.run([sys.executable, "-c", started + imported], capture_output=True, text=True)
    assert ended.returncode == bool(error) and error in ended.stderr


def test_a_start_of_python_and_a_search_for_torchvision_import_no_torch() -> None:
    started = "import sys; sys.path.insert(0, '.'); import hybridrl_torchvision; "
    code = started + "assert not {'pathlib', 'typing', 're', 'torch'} & {*sys.modules}"
    subprocess.run([sys.executable, "-S", "-c", code], cwd=TOP, check=True)
    code = (
        started + "from importlib.util import find_spec; assert find_spec('torchvision') and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=TOP, check=True)
