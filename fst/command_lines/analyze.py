"""The command line of `fst analyze`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from fst.basics.arguments import add_traceback, positive
from fst.command_lines.options import Gone, Size, add_cfg_options

NETWORKS = (
    "torchvision:resnet50",
    "torchvision:vgg16_bn",
    "torchvision:densenet121",
    "torchvision:mobilenet_v3_large",
    "torchvision:efficientnet_b0",
    "torchvision:regnet_y_400mf",
    "torchvision:shufflenet_v2_x1_0",
    "torchvision:convnext_tiny",
    "torchvision:swin_t",
    "torchvision:vit_b_16",
    "timm:resnetblur50",
    "timm:tf_efficientnet_b0",
    "timm:tf_mobilenetv3_large_100",
    "timm:resnetv2_50x1_bit",
    "timm:nf_resnet50",
    "timm:dm_nfnet_f0",
    "timm:convnext_tiny",
    "timm:vit_small_patch16_224",
    "timm:swin_tiny_patch4_window7_224",
    "timm:ghostnet_100",
)
DECAYS = (0.0, 2e-5, 6e-5, 2e-4, 6e-4, 2e-3, 6e-3, 2e-2)
RATIO = (0.60, 0.95)  # of flip rates, sparse over dense


def add_output(parser: argparse.ArgumentParser, name: str) -> None:
    """--out: where everything is written."""
    default = Path("work_dirs/analysis") / name
    parser.add_argument(
        "--out", type=Path, default=default, help=f"folder to write (default: {default})"
    )


def _coverage(parser: argparse.ArgumentParser) -> None:
    """What share of a network becomes N:M, what is exempt, and what stays dense."""
    parser.add_argument(
        "--models",
        nargs="+",
        default=list(NETWORKS),
        metavar="SOURCE:NAME",
        help="classifiers of torchvision, timm or fst (default: twenty of them)",
    )
    parser.add_argument("--strategy", default="fst", help="registered strategy (default: fst)")
    parser.add_argument("--size", type=positive, default=224, help="of images (default: 224)")


def _macs(parser: argparse.ArgumentParser) -> None:
    """Multiply-adds per layer and GEMM of a training step (FST, Figure 2)."""
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
        type=positive,
        nargs="+",
        action=Size,
        metavar=("HEIGHT", "WIDTH"),
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
    for option in ("--checkpoint", "--split", "--batches", "--random-images"):
        instead = "it counts with random weights on random images, leave the option out"
        parser.add_argument(option, action=Gone, instead=instead)


def _decay(parser: argparse.ArgumentParser) -> None:
    """Which λ of SR-STE's decay keeps masks steady: flip rates of a short warm-up."""
    parser.add_argument("config", help="training config with a strategy that has a decay")
    add_cfg_options(parser)
    parser.add_argument(
        "--decays",
        nargs="+",
        type=_factor,
        default=list(DECAYS),
        metavar="λ",
        help=f"what to try (default: {' '.join(f'{decay:g}' for decay in DECAYS)})",
    )
    parser.add_argument(
        "--steps", type=positive, default=100, help="optimizer steps of each (default: 100)"
    )
    parser.add_argument(
        "--ratio",
        nargs=2,
        type=float,
        default=list(RATIO),
        metavar=("LOW", "HIGH"),
        help="of flip rates, sparse over dense, that is good (default: "
        f"{RATIO[0]:g} {RATIO[1]:g}, see the notes of the page)",
    )
    parser.add_argument("--threads", type=positive, help="CPU threads (default: torch's)")
    parser.add_argument("--seed", type=int, help="of all runs (default: the config's, else 0)")


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number >= 0")
    return value


SUBCOMMANDS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "coverage": _coverage,
    "macs": _macs,
    "decay": _decay,
}


def parser() -> argparse.ArgumentParser:
    """`fst analyze`."""
    made = argparse.ArgumentParser(
        prog="fst analyze",
        description="Numbers about a model of your own. Every subcommand writes a folder with "
        "figures (PNG), tables (analysis.md) and analysis.json, which `fst report` shows.",
    )
    subparsers = made.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")
    for name, add_options in SUBCOMMANDS.items():
        text = add_options.__doc__ or ""
        subparser = subparsers.add_parser(name, help=text, description=text)
        add_options(subparser)
        add_output(subparser, name)
        add_traceback(subparser)
    return made
