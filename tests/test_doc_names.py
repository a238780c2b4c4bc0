"""Names below ``fst.`` and files that the documentation names exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import fst

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("kernels/*.md")))
LEFT = ("CHANGELOG.md", "negative.md")  # they name what has left
PAGES = [page for page in PAGES if page.name not in LEFT]
MADE = ("fst/.mim", "benchmarks/out")  # by an installation, by a measurement
NAME = re.compile(r"`fst((?:\.\w+)+)")
FILE = re.compile(r"\b(?:fst|tests|kernels|benchmarks|examples|tools|configs)/[\w./]*[\w/]")


def exists(name: str) -> bool:
    """True for a module below fst, and for an attribute of one."""
    found: object = fst
    for part in name.split("."):
        if not hasattr(found, part):
            try:
                importlib.import_module(f"{found.__name__}.{part}")
            except ModuleNotFoundError:
                return False
        found = getattr(found, part)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_package_exist(page: Path) -> None:
    missing = [name for name in NAME.findall(page.read_text()) if not exists(name.lstrip("."))]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page: Path) -> None:
    outside = re.sub(r"```.*?```|https?://\S+", "", page.read_text(), flags=re.DOTALL)
    named = {path for path in FILE.findall(outside) if not path.startswith(MADE)}
    named = {path for path in named if not re.search(r"[A-Z]{4}", path)}  # such as SCRIPT.py
    assert not [path for path in sorted(named) if not (ROOT / path).exists()]
