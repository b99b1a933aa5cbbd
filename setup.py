"""The packages of the wheel; all other metadata is in pyproject.toml. Directories of a checkout outside hybridrl/
are in the wheel as hybridrl/conf, hybridrl/recipes and hybridrl/docs."""

from pathlib import Path

from setuptools import find_namespace_packages, find_packages, setup
from setuptools.command.build_py import build_py

OUTSIDE = find_namespace_packages(include=["conf*", "recipes*", "docs*"])


class BuildPython(build_py):
    """Also writes the file that makes Python import hybridrl_torchvision when it starts. Of an editable installation,
    scripts/install.sh does."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, "hybridrl_torchvision.pth").write_text("import hybridrl_torchvision\n")


setup(
    cmdclass={"build_py": BuildPython},
    py_modules=["hybridrl_torchvision"],
    packages=[*find_packages(include=["hybridrl*"]), *(f"hybridrl.{name}" for name in OUTSIDE)],
    package_dir={f"hybridrl.{name}": name.replace(".", "/") for name in OUTSIDE},
)
