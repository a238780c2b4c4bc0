"""What the command lines of the lab share."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

import torch


def amp_dtype(name: str) -> torch.dtype | None:
    """The dtype of autocast; None for float32."""
    return None if name == "float32" else getattr(torch, name)


def source_and_name(text: str) -> tuple[str, str]:
    """[SOURCE:]NAME of a model; torchvision's where no source is given."""
    source, _, name = text.rpartition(":")
    return source or "torchvision", name


def command_of(command: str, arguments: Sequence[str] | None) -> str:
    """How to call `fst` ``command`` again; ``arguments`` None: those of this process."""
    given = sys.argv[1:] if arguments is None else arguments
    return shlex.join(["fst", command, *given])
