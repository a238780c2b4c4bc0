"""The commands `fst export` and `fst pack`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.model import BaseModel
from torch import nn

import fst
from fst.api.export import format_of
from fst.api.verify import check_records
from fst.files.checkpoint import load_checkpoint_safely, replacing, trained_classes
from fst.files.pt2_file import write_program
from fst.training.engine.classifier import Classifier
from fst.training.engine.config import load_config
from fst.training.engine.trained import trained_model

SUFFIXES = (".pt", ".pt2")  # of packed models


def export(arguments: argparse.Namespace) -> int:
    """Write a checkpoint's model as a file that other programs read, and check the file."""
    if format_of(Path(arguments.out)).outputs and not arguments.size:
        raise ValueError(f"OUT={arguments.out!r} needs --size HEIGHT [WIDTH].")
    config, model, channels = _trained(arguments, "fst.export")
    example = None
    if arguments.size:
        example = torch.randn(arguments.fixed_batch or 2, channels, *arguments.size)
    shipped = deployable(model)
    report = fst.export(
        shipped,
        arguments.out,
        example,
        dynamic_batch=arguments.fixed_batch is None,
        dynamic=arguments.dynamic_size,
        opset=arguments.opset,
        compressed=arguments.compressed,
    )
    images = _images(model)
    if arguments.out.endswith(".onnx"):
        annotate(arguments.out, shipped, images, _classes(config, arguments.checkpoint))
    normalised = f"(x - {images['mean']}) / {images['std']}, x in 0..255"
    print(f"{report}\nimages: {images['channels']}, {normalised}")
    return 0


def pack(arguments: argparse.Namespace) -> int:
    """Pack a checkpoint's model for this CPU, and write it."""
    path = Path(arguments.out)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"OUT={arguments.out!r}: its suffix must be {' or '.join(SUFFIXES)}.")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    _, model, channels = _trained(arguments, "fst.pack")
    check_records(model)
    example = torch.randn(arguments.batch, channels, *arguments.size)
    packed = fst.pack(deployable(model), example)
    with replacing(path) as partial, torch.no_grad():
        if path.suffix == ".pt2":
            write_program(torch.export.export(packed, (example,)), partial)
        else:
            torch.save(packed, partial)
    print(f"{packed.report}\n\nwritten: {path}")
    return 0


def _trained(arguments: argparse.Namespace, instead: str) -> tuple[Config, BaseModel, int]:
    """The config, its model with the checkpoint's weights, and the channels of its images."""
    config = load_config(arguments.config, arguments.cfg_options, arguments.checkpoint)
    model = trained_model(config, arguments.checkpoint)
    mean = getattr(model.data_preprocessor, "mean", None)
    if mean is None:
        raise ValueError(f"the config's data_preprocessor has no mean: use {instead} instead.")
    return config, model, mean.numel()


def _images(model: BaseModel) -> dict[str, object]:
    """Return the order of the colour channels, and the mean and deviation to normalise by."""
    preprocessor = model.data_preprocessor
    mean, std = (
        [float(f"{number:.7g}") for number in value.flatten().tolist()]  # of float32
        for value in (preprocessor.mean, preprocessor.std)
    )
    channels = "grey" if len(mean) == 1 else "RGB"
    if not isinstance(model, Classifier) and not preprocessor._channel_conversion:
        channels = "BGR"  # as mmcv reads images
    return {"channels": channels, "mean": mean, "std": std}


def _classes(config: Config, checkpoint: str) -> list[str]:
    """The names of the classes, if the checkpoint or the config has them."""
    return trained_classes(load_checkpoint_safely(checkpoint)) or list(config.get("classes") or ())


def annotate(
    path: str, model: nn.Module, images: Mapping[str, object], classes: Sequence[str]
) -> None:
    """Write names of outputs and what a program needs to use them into an .onnx file.

    Args:
        path: The file, which `fst.export` has written.
        model: What it holds.
        images: The metadata "channels", "mean" and "std" of the images.
        classes: The metadata "classes", names in the order of the outputs; may be empty.
    """
    import onnx

    program = onnx.load(path)
    outputs = program.graph.output
    names, metadata = ["logits"], {"classes": json.dumps(list(classes))}
    if hasattr(model, "output_names"):
        names, metadata = model.output_names(len(outputs)), model.metadata(classes)
    renamed = dict(zip((output.name for output in outputs), names, strict=False))
    for entry in (*outputs, *program.graph.value_info):
        entry.name = renamed.get(entry.name, entry.name)
    for node in program.graph.node:
        for tensors in (node.input, node.output):
            tensors[:] = [renamed.get(name, name) for name in tensors]
    metadata |= {name: json.dumps(value) for name, value in images.items()}
    written = {entry.key: entry.value for entry in program.metadata_props}
    onnx.helper.set_model_props(program, written | metadata)
    onnx.checker.check_model(program)
    with replacing(path) as whole:
        onnx.save(program, whole)


def deployable(model: BaseModel) -> nn.Module:
    """Return the part of a config's model that is exported: images in, tensors out."""
    if isinstance(model, Classifier):
        return model.architecture
    from fst.training.detection.deploy import HeadOutputs

    return HeadOutputs(model)
