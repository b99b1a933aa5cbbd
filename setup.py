"""The packages of the wheel; all other metadata is in pyproject.toml. Directories of a checkout outside hybridrl/
are in the wheel as hybridrl/conf, hybridrl/recipes and hybridrl/docs."""

from setuptools import find_namespace_packages, find_packages, setup

OUTSIDE = find_namespace_packages(include=["conf*", "recipes*", "docs*"])

setup(
    packages=[*find_packages(include=["hybridrl*"]), *(f"hybridrl.{name}" for name in OUTSIDE)],
    package_dir={f"hybridrl.{name}": name.replace(".", "/") for name in OUTSIDE},
)
