"""What the command lines of the studies share."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

import torch

DTYPES = ("float32", "bfloat16", "float16")


def amp_dtype(name: str) -> torch.dtype | None:
    """The dtype of autocast; None for float32."""
    return None if name == "float32" else getattr(torch, name)


def command_of(command: str, arguments: Sequence[str] | None) -> str:
    """How to call `fst` ``command`` again; ``arguments`` None: those of this process."""
    given = sys.argv[1:] if arguments is None else arguments
    return shlex.join(["fst", command, *given])
