"""The commands that need PyTorch alone: `fst verify`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import fst
from fst.basics.arguments import add_traceback, user_errors
from fst.checkpoint import load_checkpoint_safely
from fst.stored.files import READERS


def _is_training_checkpoint(path: str) -> bool:
    if Path(path).suffix in READERS:
        return False
    checkpoint = load_checkpoint_safely(path)
    return isinstance(checkpoint, dict) and "sparsity" in checkpoint


def verify(argv: Sequence[str] | None = None) -> int:
    """Check the N:M pattern of a checkpoint's weights; exit status 0 only if all layers obey."""
    parser = argparse.ArgumentParser(
        prog="fst verify",
        description="Check that the weights of a checkpoint obey an N:M pattern, and say "
        "which share of the model that is (exit status: 0 yes, 1 no, 2 error).",
    )
    parser.add_argument(
        "checkpoint", help="folded checkpoint, any state_dict, .safetensors, .onnx or .pt2"
    )
    parser.add_argument(
        "--n",
        type=int,
        help="weights kept per group (default, without --m too: as the file says, else 2)",
    )
    parser.add_argument("--m", type=int, help="group size (likewise, else 4)")
    parser.add_argument(
        "--group-order",
        choices=("channel", "im2col"),
        help="where groups run (default: as the file says, else channel)",
    )
    parser.add_argument("--include", nargs="+", metavar="PATTERN", help="only these layers")
    parser.add_argument("--exclude", nargs="+", metavar="PATTERN", help="not these layers")
    parser.add_argument(
        "--min-coverage",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="least share (0 to 1) of all convolutions' and linear layers' weights in full N:M "
        "groups (default: 0)",
    )
    add_traceback(parser)
    arguments = parser.parse_args(argv)
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
