"""The command lines of what trains and uses trained models."""

from __future__ import annotations

import argparse
from pathlib import Path

from fst.basics.arguments import add_traceback, positive
from fst.cli.options.parsing import SIZE, add_cfg_options, command

NEWEST = ""  # of --resume: the checkpoint of the work dir
CONFIG = "config (.py, .json or .yaml), or one of the package: fst::configs/..."
CHECKPOINT = "training checkpoint, or file written by `fst fold`"
CHANGES = (
    "changes to the config, such as train_dataloader.batch_size=8 optim_wrapper.optimizer.lr=0.1 "
    "'model.data_preprocessor.mean=[0,0,0]'"
)


def train() -> argparse.ArgumentParser:
    """`fst train`."""
    parser = _run("train", "Train a model, sparsely if the config says so.")
    add = parser.add_argument
    again = (
        "continue from a checkpoint; without PATH from the newest in the work dir; 'auto': the "
        "same, but start if there is none"
    )
    add("--resume", nargs="?", const=NEWEST, metavar="PATH", help=again)
    add("--epochs", type=positive, help="length of the training and of its schedules")
    mixed = "mixed precision, bfloat16 unless the config says float16"
    add("--amp", action="store_true", help=mixed)
    return parser


def test() -> argparse.ArgumentParser:
    """`fst test`."""
    parser = _run("test", "Evaluate a checkpoint on the config's test data.")
    add = parser.add_argument
    add("checkpoint", help=CHECKPOINT)
    drawn = (
        "draw the test images into DIR: on the left the annotated boxes, on the right what a "
        "detector finds"
    )
    add("--show-dir", metavar="DIR", help=drawn)
    least = "draw detections from this score on (default: 0.3)"
    add("--show-score-thr", type=float, metavar="SCORE", help=least)
    return parser


def fold() -> argparse.ArgumentParser:
    """`fst fold`."""
    text = (
        "Write the pruned weights of a training checkpoint as a plain state_dict, "
        "which the unconverted model of timm, torchvision, fst.models or mmdet loads."
    )
    return _trained("fold", text, "training checkpoint", "file to write")


def export() -> argparse.ArgumentParser:
    """`fst export`."""
    text = (
        "Write the folded model of a checkpoint as ONNX, torch.export or safetensors, "
        "read it back and check it. A classifier's file takes normalised images and gives logits; "
        "a detector's gives what its head computes, before boxes are decoded and chosen."
    )
    parser = _trained("export", text, CHECKPOINT, "file to write: .onnx, .pt2 or .safetensors")
    add = parser.add_argument
    size = "of the images, one number for squares; needed for .onnx and .pt2"
    add("--size", **SIZE, help=size)
    fixed = "the file takes N images, not any number"
    add("--fixed-batch", type=positive, metavar="N", help=fixed)
    sizes = ".onnx and .pt2: the file takes images of other heights and widths too"
    add("--dynamic-size", action="store_true", help=sizes)
    opset = ".onnx: version of its operators, such as 13 or 11 (what torch's exporter writes: 20)"
    add("--opset", type=positive, metavar="N", help=opset)
    compressed = ".safetensors: N:M weights as values and positions, for fst.load"
    add("--compressed", action="store_true", help=compressed)
    return parser


def pack() -> argparse.ArgumentParser:
    """`fst pack`."""
    text = (
        "Pack the folded model of a checkpoint for inference on this CPU: each layer runs by the "
        "library or by the zeros of its weight, whichever is faster here. Prints both times."
    )
    written = "file to write: .pt (for torch.load, weights_only=False) or .pt2 (torch.export)"
    parser = _trained("pack", text, CHECKPOINT, written)
    add = parser.add_argument
    add("--size", **SIZE, required=True, help="of the images, one number for squares")
    add("--batch", type=positive, default=1, help="images that it is timed on (1)")
    add("--threads", type=positive, help="CPU threads (torch's default)")
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
    showing.add_argument("config", help=CONFIG)
    add_cfg_options(showing)
    copying = actions.add_parser("copy", help="copy all of them, to change them")
    copying.add_argument("folder", type=Path, help="folder to make")
    for action in (listing, showing, copying):
        add_traceback(action)
    return parser


def _run(name: str, description: str) -> argparse.ArgumentParser:
    parser = command(name, description)
    add = parser.add_argument
    add("config", help=CONFIG)
    add("--work-dir", help="folder for logs and checkpoints (default: work_dirs/<config name>)")
    add(
        "--launcher",
        choices=("none", "pytorch"),
        default="none",
        help="'pytorch' if started by torchrun (default: none)",
    )
    add("--seed", type=int, help="seed of everything random (default: the config's)")
    add_cfg_options(parser, CHANGES)
    return parser


def _trained(name: str, description: str, checkpoint: str, out: str) -> argparse.ArgumentParser:
    parser = command(name, description)
    parser.add_argument("config", help="config that the checkpoint was trained with")
    parser.add_argument("checkpoint", help=checkpoint)
    parser.add_argument("out", help=out)
    add_cfg_options(parser)
    return parser
