"""What share of a network becomes N:M, what is exempt, and what stays dense."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import fst
from fst.lab.arguments import source_and_name
from fst.lab.reporting.document import Document
from fst.models.named import build_architecture
from fst.report import ConversionReport
from fst.strategies.registry import get_strategy

CHOICES: dict[str, Mapping[str, Any]] = {
    "Default layers": {},
    'layers="all"': {"layers": "all"},
    'include="*"': {"include": "*"},
}
CAPTION = (
    "Converted: layers that the strategy takes; exempt: those of them whose groups are all shorter "
    "than M; skipped: left dense. Coverage: share of the weights of all convolutions and linear "
    "layers that lies in full N:M groups; multiply-adds: the share of those layers' forward pass "
    "that they stand for; ≤ where the model multiplies with some of their weights without calling "
    "the layer, so that nobody counted it."
)


def run(options: argparse.Namespace) -> Document:
    """Convert each network on the meta device, where nothing is computed, once for each choice."""
    get_strategy(options.strategy)
    result = Document(
        "Coverage",
        f"Strategy {options.strategy}, images of {options.size}x{options.size}.",
    )
    reports = {
        name: [convert(name, options.strategy, options.size, **c) for c in CHOICES.values()]
        for name in options.models
    }
    columns = ["network", "converted", "exempt", "skipped", "coverage", "multiply-adds"]
    for which, title in enumerate(CHOICES):
        rows = [[name, *_cells(found[which])] for name, found in reports.items()]
        result.add_table(title, columns, rows, CAPTION)
    left: dict[str, list[str]] = {}
    for name, found in reports.items():
        for label in dict.fromkeys(w.label for w in found[-1].covered.weights if not w.inside):
            left.setdefault(label, []).append(name)
    rows = [[label, len(names), ", ".join(names[:3])] for label, names in left.items()]
    result.add_table("What is left with all included", ["weights", "networks", "first"], rows)
    return result


def convert(name: str, strategy: str, size: int, **choice: Any) -> ConversionReport:
    """The report of converting a classifier "[torchvision:|timm:|fst:]NAME".

    ``choice`` are `fst.convert`'s arguments that choose layers.

    Raises:
        ValueError: unknown source or name.
    """
    model = build_architecture(*source_and_name(name)).to("meta")
    images = torch.empty(1, 3, size, size, device="meta")
    return fst.convert(model, strategy, example_input=images, **choice)


def _cells(report: ConversionReport) -> Sequence[object]:
    exempt = sum(w.label.startswith("exempt") for w in report.covered.weights)
    skipped = len(report.covered.weights) - len(report.layers)
    share = _percent(report.covered.multiply_adds or 0.0)
    if not all(weight.multiply_adds for weight in report.covered.weights):
        share = f"≤ {share}"
    return len(report.layers), exempt, skipped, _percent(report.coverage), share


def _percent(share: float) -> str:
    return f"{share:.1%}"
