"""The command line of `fst analyze`."""

from __future__ import annotations

import argparse
from pathlib import Path

from fst.basics.arguments import add_traceback, positive
from fst.cli.options.parsing import SIZE, add_cfg_options


def add_output(parser: argparse.ArgumentParser, name: str) -> None:
    """--out: where everything is written."""
    default = Path("work_dirs/analysis") / name
    parser.add_argument(
        "--out", type=Path, default=default, help=f"folder to write (default: {default})"
    )


def _macs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "configs",
        nargs="*",
        metavar="config",
        help="training config, of a classifier or a detector (or use --model)",
    )
    add_cfg_options(parser)
    parser.add_argument(
        "--model",
        metavar="[SOURCE:]NAME",
        help="instead of a config: a classifier of torchvision (the default), timm or fst, such as "
        "resnet18 or timm:resnet50",
    )
    parser.add_argument(
        "--size",
        **SIZE,
        help="of the images, one number for squares (default: 224 with --model; a detector's own)",
    )
    parser.add_argument("--batch-size", type=positive, default=1, help="images (default: 1)")
    parser.add_argument(
        "--strategies",
        "--strategy",
        nargs="+",
        default=[],
        metavar="NAME[,option=value...]",
        help="what training prunes (default: as each config says; dense without one)",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="convert what the strategy or the config leaves dense, fully connected layers too",
    )


def parser() -> argparse.ArgumentParser:
    """`fst analyze`."""
    made = argparse.ArgumentParser(
        prog="fst analyze",
        description="Numbers about a model of your own: a folder with figures (PNG), tables "
        "(analysis.md) and analysis.json, which `fst report` shows.",
    )
    subparsers = made.add_subparsers(dest="command", required=True, metavar="macs")
    text = "Multiply-adds per layer and GEMM of a training step (FST, Figure 2)."
    macs = subparsers.add_parser("macs", help=text, description=text)
    _macs(macs)
    add_output(macs, "macs")
    add_traceback(macs)
    return made
