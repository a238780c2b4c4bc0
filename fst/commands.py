"""The commands that need PyTorch alone: `fst verify`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import fst
from fst.basics.arguments import user_errors
from fst.checkpoint import load_checkpoint_safely
from fst.command_lines.library import verify as command_line
from fst.stored.files import READERS


def _is_training_checkpoint(path: str) -> bool:
    if Path(path).suffix in READERS:
        return False
    checkpoint = load_checkpoint_safely(path)
    return isinstance(checkpoint, dict) and "sparsity" in checkpoint


def verify(argv: Sequence[str] | None = None) -> int:
    """Check the N:M pattern of a checkpoint's weights; exit status 0 only if all layers obey."""
    arguments = command_line().parse_args(argv)
    with user_errors(arguments):
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
    if not report.ok and _is_training_checkpoint(arguments.checkpoint):
        print(
            f"\n{arguments.checkpoint} is a training checkpoint: it holds the dense weights, "
            f"of which training uses a pruned copy. Write that copy with\n"
            f"    fst fold CONFIG {arguments.checkpoint} OUT\nand verify OUT."
        )
    return 0 if report.ok else 1
