"""The commands that need PyTorch alone: `fst verify` and `fst strategies`."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import fst
from fst.files.checkpoint import load_checkpoint_safely
from fst.files.formats import FORMATS
from fst.strategies.registry import recipe_of


def _is_training_checkpoint(path: str) -> bool:
    if Path(path).suffix in FORMATS:
        return False
    checkpoint = load_checkpoint_safely(path)
    return isinstance(checkpoint, dict) and bool(checkpoint.get("sparsity"))


def verify(arguments: argparse.Namespace) -> int:
    """Check the N:M pattern of a checkpoint's weights; exit status 0 only if all layers obey."""
    report = fst.verify(
        arguments.checkpoint,
        arguments.n,
        arguments.m,
        group_order=arguments.group_order,
        include=arguments.include,
        exclude=arguments.exclude,
        min_coverage=arguments.min_coverage,
    )
    print(report)
    if not report.ok:
        way = "Of a converted model, save fst.fold(model).state_dict()"
        if _is_training_checkpoint(arguments.checkpoint):
            fold = f"fst fold CONFIG {arguments.checkpoint} OUT"
            way = f"Write that copy with\n    {fold}\nand verify OUT"
        print(f"\nTraining keeps dense weights, and uses a pruned copy. {way}.")
    return 0 if report.ok else 1


class Described(NamedTuple):
    """A strategy in words, from the docstrings of its function and of its file.

    Attributes:
        prunes: the operands of its products.
        idea: a line.
        source: authors, title and year of its paper; "" without one.
    """

    prunes: str
    idea: str
    source: str


def described(name: str) -> Described:
    """A registered strategy in words."""
    recipe = recipe_of(name)
    prunes = _paragraphs(inspect.getdoc(recipe))
    idea, *others = _paragraphs(inspect.getdoc(sys.modules[recipe.__module__]))
    papers = (re.match(r"Papers?: (.*?\b(?:19|20)\d\d\b\)?)", text) for text in [idea, *others])
    return Described(prunes[0], idea, next((found[1] for found in papers if found), ""))


def _paragraphs(doc: str | None) -> list[str]:
    return [" ".join(text.split()) for text in (doc or "").split("\n\n")]


def strategies(_: argparse.Namespace) -> int:
    """List all registered strategies."""
    for name in fst.list_strategies():
        lines = [line for line in described(name) if line]
        print(name, *(textwrap.indent(line, "    ") for line in lines), sep="\n")
    return 0
