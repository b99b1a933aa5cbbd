"""Scripts of the repository as commands, in the process of a test: a process for each would take minutes."""

import os
import runpy
import sys
from pathlib import Path

import pytest


def run_script(script: Path, *words: object) -> int | str | None:
    """Run a script with these arguments; return the status or the message with which it exits.

    Modules that it imports from its own directory are unloaded afterwards: those of another script have the same names.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(script.parent))
        patch.setattr(sys, "argv", [script.name, *map(str, words)])
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            return ended.code
        finally:
            for name, module in [*sys.modules.items()]:
                if (getattr(module, "__file__", None) or "").startswith(f"{script.parent}{os.sep}"):
                    del sys.modules[name]
    return None
