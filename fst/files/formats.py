"""The kinds of files that `fst.export` writes and `fst.verify` reads, by their suffix."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from fst.files import onnx_file, pt2_file, safetensors_file
from fst.files.options import Inputs, Options
from fst.files.records import Stored

Outputs = Callable[[Path, Inputs], list[Any] | None]


class Format(NamedTuple):
    """A kind of file.

    Attributes:
        write: model, inputs, options, and the file.
        read: its weights.
        takes: the options that it has, of those that not all have.
        outputs: what a file computes of inputs, or None where nothing that could run it is
            installed; None for a file of weights alone.
        unoptimised: the same as ``outputs``, of each operation as the file has it; None where they
            are that anyway.
    """

    write: Callable[[nn.Module, Inputs, Options, Path], None]
    read: Callable[[Path], Stored]
    takes: tuple[str, ...]
    outputs: Outputs | None = None
    unoptimised: Outputs | None = None


FORMATS = {
    ".onnx": Format(
        onnx_file.write,
        onnx_file.read,
        ("dynamic", "opset"),
        onnx_file.outputs,
        partial(onnx_file.outputs, optimised=False),
    ),
    ".pt2": Format(pt2_file.write, pt2_file.read, ("dynamic",), pt2_file.outputs),
    ".safetensors": Format(safetensors_file.write, safetensors_file.read, ("compressed",)),
}
