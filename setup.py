"""The packages of the wheel; all other metadata is in pyproject.toml. What lies beside hybridrl/ in a checkout lies
below it in the wheel: hybridrl/conf, hybridrl/recipes, hybridrl/docs."""

from setuptools import find_namespace_packages, find_packages, setup

BESIDE = find_namespace_packages(include=["conf*", "recipes*", "docs*"])

setup(
    packages=[*find_packages(include=["hybridrl*"]), *(f"hybridrl.{name}" for name in BESIDE)],
    package_dir={f"hybridrl.{name}": name.replace(".", "/") for name in BESIDE},
)
