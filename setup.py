"""The packages: fst, and the kernels' folder as fst.kernels; the README as an index shows it.

All else is in setup.cfg.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

RELATIVE = r"\((?!https?:|#)([^)]+)\)"


def index_page(readme: str) -> str:
    """README.md where links into the repository lead nowhere: their paths as text, no images."""
    shown = re.sub(rf"!\[[^\]]*\]{RELATIVE}\n*", "", readme)
    shown = re.sub(r"\[([^\]]+)\]\(\1\)", r"\1", shown)
    return re.sub(rf"\[([^\]]+)\]{RELATIVE}", r"\1 (\2)", shown)


setup(
    long_description=index_page(Path(__file__).with_name("README.md").read_text("utf-8")),
    packages=[*find_packages(include=["fst", "fst.*"]), "fst.kernels", "fst.kernels.sparse24"],
    package_dir={"fst.kernels": "kernels"},
)
