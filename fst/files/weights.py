"""The weights in a file: a checkpoint, .safetensors, .onnx or .pt2; no code from it is run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fst.files.checkpoint import (
    check_sizes,
    load_checkpoint_safely,
    state_dict_in,
    state_dict_of,
)
from fst.files.formats import FORMATS
from fst.files.pt2_file import OldFileError
from fst.files.records import Stored, records_in

PACKED = "_packed_params._packed_params"  # a quantised linear layer's key of (weight, bias)


def read_stored(path: str | os.PathLike[str]) -> Stored:
    """The weights in a file, and their records.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or of another kind than its suffix says.
        ModuleNotFoundError: a package of the extra "export" is not installed.
    """
    path = Path(path).expanduser()
    if path.suffix not in FORMATS:
        found = stored_in(load_checkpoint_safely(path), str(path))
        check_sizes(found.weights, path)
        return found
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} does not exist or is no file.")
    try:
        found = FORMATS[path.suffix].read(path)
        if not found.weights:
            raise ValueError("it holds no weights")
        return found
    except (ImportError, OldFileError):
        raise
    except Exception as error:  # of the many kinds of the libraries that read files
        reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        raise ValueError(
            f"{str(path)!r} is no {path.suffix} file, or damaged: {reason}."
        ) from error


def stored_in(checkpoint: Mapping[Any, Any], name: str) -> Stored:
    """The weights of a state_dict, or of the one in a checkpoint, which may hold others too.

    Raises:
        ValueError: it holds none, or a damaged record.
    """
    weights = state_dict_of(checkpoint, name) | _packed_weights(checkpoint)
    own = state_dict_in(checkpoint)
    others = {} if own is checkpoint else checkpoint
    return Stored(
        weights,
        records_in(checkpoint, name),
        others=tuple(str(k) for k, v in others.items() if v is not own and _is_state_dict(v)),
    )


def _is_state_dict(value: object) -> bool:
    """True for a dict of weights, not of an optimizer's or a hook's state."""
    values = value.values() if isinstance(value, Mapping) else ()
    return any(isinstance(held, Tensor) and held.dim() > 1 for held in values)


def _packed_weights(checkpoint: Any) -> dict[str, Tensor]:
    """The weights that torch.ao's quantised linear layers keep in one entry with their biases."""
    return {
        key.removeprefix("module.").replace(PACKED, "weight"): value[0]
        for key, value in state_dict_in(checkpoint).items()
        if isinstance(key, str) and key.endswith(PACKED) and isinstance(value, tuple)
    }
