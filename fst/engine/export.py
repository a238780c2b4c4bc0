"""The command line of `fst export`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from mmengine.model import BaseModel
from torch import nn

import fst
from fst.basics.arguments import add_traceback, positive, user_errors
from fst.engine.arguments import add_cfg_options, check_out
from fst.engine.classifier import Classifier
from fst.engine.config import load_config
from fst.engine.trained import trained_model


def main(argv: Sequence[str] | None = None) -> int:
    """Write a checkpoint's model as a file that other programs read, and check the file."""
    parser = argparse.ArgumentParser(
        prog="fst export",
        description="Write the folded model of a checkpoint as ONNX, torch.export or safetensors, "
        "read it back and check it. A classifier's file takes normalised images and gives logits; "
        "a detector's gives what its head computes, before boxes are decoded and chosen.",
    )
    parser.add_argument("config", help="config that the checkpoint was trained with")
    parser.add_argument("checkpoint", help="training checkpoint, or file written by `fst fold`")
    parser.add_argument("out", help="file to write: .onnx, .pt2 or .safetensors")
    parser.add_argument(
        "--size",
        type=positive,
        nargs="+",
        metavar=("HEIGHT", "WIDTH"),
        help="of the images, one number for squares; needed for .onnx and .pt2",
    )
    parser.add_argument(
        "--fixed-batch", type=positive, metavar="N", help="the file takes N images, not any number"
    )
    add_cfg_options(parser)
    add_traceback(parser)
    arguments = parser.parse_args(argv)
    if arguments.size and len(arguments.size) > 2:
        parser.error(f"argument --size: {arguments.size} is not one number or two")
    with user_errors(arguments):
        check_out(arguments.out, arguments.checkpoint)
        config = load_config(arguments.config, arguments.cfg_options, arguments.checkpoint)
        model = trained_model(config, arguments.checkpoint)
        if not hasattr(model.data_preprocessor, "mean"):
            raise ValueError("the config's data_preprocessor has no mean: use fst.export instead.")
        mean = model.data_preprocessor.mean.flatten()
        example = None
        if arguments.size:
            height, width = arguments.size[0], arguments.size[-1]
            example = torch.randn(arguments.fixed_batch or 2, len(mean), height, width)
        elif not arguments.out.endswith(".safetensors"):
            raise ValueError(f"OUT={arguments.out!r} needs --size HEIGHT [WIDTH].")
        report = fst.export(
            deployable(model),
            arguments.out,
            example,
            dynamic_batch=arguments.fixed_batch is None,
        )
    std = model.data_preprocessor.std.flatten()
    print(f"{report}\nimages: (x - {mean.tolist()}) / {std.tolist()}, x in 0..255")
    return 0


def deployable(model: BaseModel) -> nn.Module:
    """What of a config's model is written: images in, tensors out."""
    if isinstance(model, Classifier):
        return model.architecture
    from fst.detection.deploy import HeadOutputs

    return HeadOutputs(model)
