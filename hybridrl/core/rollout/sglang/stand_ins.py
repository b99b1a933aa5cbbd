"""Empty modules in place of torchvision if it is not installed, as on CPU: SGLang imports it with its text models. This
module is imported first in every process that imports SGLang."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from transformers.utils import is_torchvision_available


class StandIn(ModuleType):
    """A module that has every name, as an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


if not is_torchvision_available():  # transformers keeps this answer, so it never takes the stand-ins for the library
    for module in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.io"):
        sys.modules[module] = stand_in = StandIn(module)
        stand_in.__spec__, stand_in.__path__ = ModuleSpec(module, None, is_package=True), []
