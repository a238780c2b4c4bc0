"""The packages: fst, and the kernels' folder as fst.kernels; all else is in setup.cfg."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["fst", "fst.*"]), "fst.kernels", "fst.kernels.sparse24"],
    package_dir={"fst.kernels": "kernels"},
)
