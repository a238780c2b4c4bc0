"""`load`: the state_dict in a .safetensors file, compressed or not."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

from torch import Tensor

from fst.files.records import as_metadata
from fst.files.weights import read_stored


def load(path: str | os.PathLike[str]) -> OrderedDict[str, Tensor]:
    """The state_dict that `fst.export` wrote, on the CPU, with weights as they were.

    Its metadata say which weights are N:M, for `fst.verify`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the suffix is another one, or the file is damaged.
        ModuleNotFoundError: safetensors is not installed.
    """
    if Path(path).suffix != ".safetensors":
        raise ValueError(
            f"path={str(path)!r}: fst.load reads .safetensors; torch.load reads checkpoints, "
            "torch.export.load .pt2 and onnxruntime .onnx."
        )
    stored = read_stored(path)
    state = OrderedDict(stored.weights)
    state._metadata = as_metadata(stored.records)  # type: ignore[attr-defined]  # as torch's have
    return state
