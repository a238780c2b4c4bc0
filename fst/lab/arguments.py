"""What the command lines of the lab share."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import torch

from fst import get_strategy
from fst.rules.strategy import Strategy


def amp_dtype(name: str) -> torch.dtype | None:
    """The dtype of autocast; None for float32."""
    return None if name == "float32" else getattr(torch, name)


def named_options(text: str) -> tuple[str, dict[str, Any]]:
    """NAME or NAME,OPTION=VALUE,... with Python's values, or plain words."""
    name, *parts = re.split(r",(?=\w+=)", text)
    return name, {option: _literal(value) for option, value in (p.split("=", 1) for p in parts)}


def strategy_of(text: str) -> Strategy:
    """The strategy of NAME or NAME,OPTION=VALUE,..."""
    name, options = named_options(text)
    return get_strategy(name, **options)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def source_and_name(text: str) -> tuple[str, str]:
    """[SOURCE:]NAME of a model; torchvision's where no source is given."""
    source, _, name = text.rpartition(":")
    return source or "torchvision", name


def command_of(command: str, arguments: Sequence[str] | None) -> str:
    """How to call `fst` ``command`` again; ``arguments`` None: those of this process."""
    given = sys.argv[1:] if arguments is None else arguments
    return shlex.join(["fst", command, *given])
