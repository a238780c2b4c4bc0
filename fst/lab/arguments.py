"""Arguments that the command lines of the lab share."""

from __future__ import annotations

import argparse
import shlex

import torch


def amp_dtype(name: str) -> torch.dtype | None:
    """The dtype of autocast; None for float32."""
    return None if name == "float32" else getattr(torch, name)


def source_and_name(text: str) -> tuple[str, str]:
    """[SOURCE:]NAME of a model; torchvision's where no source is given."""
    source, _, name = text.rpartition(":")
    return source or "torchvision", name


def command_of(command: str, line: argparse.Namespace) -> str:
    """Return the line that calls `fst` ``command`` again, from its parsed line."""
    return shlex.join(["fst", command, *line.words])
