"""Shared by the pages of this folder's programs: the machine in words, goals, where they lie."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
OUT = ROOT / "benchmarks" / "out"
RESULTS = ROOT / "docs" / "results"
BOLD = (
    "A goal is bold if it is reached, also after division by the control's ratio where that is "
    "above 1."
)
Goals = tuple[float, float]  # with AVX2, with AVX-512


def machine(header: Mapping[str, Any]) -> str:
    """Processor, instruction set and torch, of `fst.cli.environment.surroundings`."""
    return f"{header['device']}, {header['instruction set']}, torch {header['torch']}"


def operations_page() -> Path:
    """The page of zeros.py for the instruction set of torch and of the C++ kernels."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return RESULTS / f"cpu_zeros_ops{'_avx512' if wide else ''}.md"


def goal_of(goals: Goals) -> float:
    """The goal for the instruction set of torch and of the C++ kernels."""
    return goals[torch.backends.cpu.get_cpu_capability() == "AVX512"]


def is_reached(goals: Goals, ratio: float, control: float) -> bool:
    """True if a ratio reaches its goal, as `BOLD` says; ``control`` is the control's ratio."""
    return ratio / max(control, 1.0) >= goal_of(goals)


def goal_cell(goals: Goals | None, ratio: float, control: float) -> str:
    """The goal as a cell of a table: bold if it is reached, empty if there is none."""
    if goals is None:
        return ""
    return f"**{goal_of(goals)}**" if is_reached(goals, ratio, control) else str(goal_of(goals))
