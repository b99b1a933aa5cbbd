"""Makes torchvision importable next to a torch for CPUs. hybridrl_torchvision.pth imports this module whenever Python
starts, since vLLM's own processes import torchvision before anything of hybridrl; it therefore imports next to nothing.

The Python Package Index has builds of torchvision for CUDA only. Their compiled operators do not load next to a torch
for CPUs, and their import fails where it refers to two of these. Processors of pictures need none.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

OPERATORS = ("nms", "qnms")  # the import of torchvision 0.26 to 0.28 refers to them
_libraries = []  # a declaration lasts as long as its library


class TorchvisionFinder:
    """Finds torchvision as a module that declares these operators before it is executed."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name) if name == "torchvision" else None
        if spec is None or spec.loader is None or spec.origin is None:
            return None
        execute, version = spec.loader.exec_module, os.path.join(os.path.dirname(spec.origin), "version.py")

        def declare_and_execute(module: object) -> None:
            declare_operators(version)
            execute(module)

        spec.loader.exec_module = declare_and_execute
        return spec


def declare_operators(version: str) -> None:
    """Declare the operators once, if torch is built for CPUs and torchvision, by this file of its, for CUDA."""
    import torch

    if _libraries or torch.version.cuda or not os.path.exists(version):
        return
    with open(version, encoding="utf-8") as file:
        if "+cu" not in file.read():
            return
    _libraries.append(torch.library.Library("torchvision", "FRAGMENT"))
    for name in OPERATORS:
        _libraries[0].define(f"{name}(Tensor boxes, Tensor scores, float overlap) -> Tensor")


sys.meta_path.insert(0, TorchvisionFinder)
