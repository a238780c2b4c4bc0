"""The command lines of what trains and uses trained models."""

from __future__ import annotations

import argparse
from pathlib import Path

from fst.basics.arguments import add_traceback, positive
from fst.cli.options.parsing import Size, add_cfg_options, command

NEWEST = ""  # of --resume: the checkpoint of the work dir


def train() -> argparse.ArgumentParser:
    """`fst train`."""
    parser = command("train", "Train a model, sparsely if the config says so.")
    _run_options(parser)
    parser.add_argument(
        "--resume",
        nargs="?",
        const=NEWEST,
        metavar="PATH",
        help="continue from a checkpoint; without PATH from the newest in the work dir; 'auto': "
        "likewise, but start if there is none",
    )
    parser.add_argument(
        "--epochs", type=positive, help="length of the training and of its schedules"
    )
    parser.add_argument(
        "--skip-broken",
        action="store_true",
        help="leave out images in folders that cannot be read, or are there in part; count them",
    )
    parser.add_argument(
        "--amp",
        action="store_true",
        help="mixed precision, bfloat16 unless the config says float16",
    )
    return parser


def test() -> argparse.ArgumentParser:
    """`fst test`."""
    parser = command("test", "Evaluate a checkpoint on the config's test data.")
    _run_options(parser)
    parser.add_argument("checkpoint", help="training checkpoint, or file written by `fst fold`")
    parser.add_argument(
        "--show-dir",
        metavar="DIR",
        help="draw the test images into DIR: on the left the annotated boxes, on the right what a "
        "detector finds",
    )
    parser.add_argument(
        "--show-score-thr",
        type=float,
        metavar="SCORE",
        help="draw detections from this score on (default: 0.3)",
    )
    return parser


def fold() -> argparse.ArgumentParser:
    """`fst fold`."""
    parser = command(
        "fold",
        "Write the pruned weights of a training checkpoint as a plain state_dict, "
        "which the unconverted model of timm, torchvision, fst.models or mmdet loads.",
    )
    _trained_options(parser, "training checkpoint", "file to write")
    return parser


def export() -> argparse.ArgumentParser:
    """`fst export`."""
    parser = command(
        "export",
        "Write the folded model of a checkpoint as ONNX, torch.export or safetensors, "
        "read it back and check it. A classifier's file takes normalised images and gives logits; "
        "a detector's gives what its head computes, before boxes are decoded and chosen.",
    )
    checkpoint = "training checkpoint, or file written by `fst fold`"
    _trained_options(parser, checkpoint, "file to write: .onnx, .pt2 or .safetensors")
    parser.add_argument(
        "--size",
        type=positive,
        nargs="+",
        action=Size,
        metavar=("HEIGHT", "WIDTH"),
        help="of the images, one number for squares; needed for .onnx and .pt2",
    )
    parser.add_argument(
        "--fixed-batch", type=positive, metavar="N", help="the file takes N images, not any number"
    )
    return parser


def pack() -> argparse.ArgumentParser:
    """`fst pack`."""
    parser = command(
        "pack",
        "Pack the folded model of a checkpoint for inference on this CPU: each layer runs by the "
        "library or by the zeros of its weight, whichever is faster here. Prints both times.",
    )
    checkpoint = "training checkpoint, or file written by `fst fold`"
    written = "file to write: .pt (for torch.load, weights_only=False) or .pt2 (torch.export)"
    _trained_options(parser, checkpoint, written)
    parser.add_argument(
        "--size",
        type=positive,
        nargs="+",
        action=Size,
        required=True,
        metavar=("HEIGHT", "WIDTH"),
        help="of the images, one number for squares",
    )
    parser.add_argument("--batch", type=positive, default=1, help="images that it is timed on (1)")
    parser.add_argument("--threads", type=positive, help="CPU threads (torch's default)")
    return parser


def configs() -> argparse.ArgumentParser:
    """`fst configs`."""
    parser = argparse.ArgumentParser(
        prog="fst configs",
        description="The configs of the package: `fst train fst::configs/demo_digits.py` trains "
        'one, and `_base_ = "fst::configs/demo_digits.py"` inherits it.',
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show|copy")
    listing = actions.add_parser("list", help="print their names")
    listing.add_argument("pattern", nargs="?", default="*", help="glob, such as '*resnet50*'")
    showing = actions.add_parser(
        "show", help="print one, or a config of your own, with all that it inherits"
    )
    showing.add_argument("config", help="config (.py, .json or .yaml), or fst::configs/...")
    add_cfg_options(showing)
    copying = actions.add_parser("copy", help="copy all of them, to change them")
    copying.add_argument("folder", type=Path, help="folder to make")
    for action in (listing, showing, copying):
        add_traceback(action)
    return parser


def _run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", help="config (.py, .json or .yaml), or one of the package: fst::configs/..."
    )
    parser.add_argument(
        "--work-dir", help="folder for logs and checkpoints (default: work_dirs/<config name>)"
    )
    parser.add_argument(
        "--launcher",
        choices=("none", "pytorch"),
        default="none",
        help="'pytorch' if started by torchrun (default: none)",
    )
    parser.add_argument(
        "--seed", type=int, help="seed of everything random (default: the config's)"
    )
    add_cfg_options(
        parser,
        "changes to the config, such as train_dataloader.batch_size=8 "
        "optim_wrapper.optimizer.lr=0.1 'model.data_preprocessor.mean=[0,0,0]'",
    )


def _trained_options(parser: argparse.ArgumentParser, checkpoint: str, out: str) -> None:
    parser.add_argument("config", help="config that the checkpoint was trained with")
    parser.add_argument("checkpoint", help=checkpoint)
    parser.add_argument("out", help=out)
    add_cfg_options(parser)
