"""The weights in a file: a checkpoint, .safetensors, .onnx or .pt2; no code from it is run."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst.basics.extras import extra_named
from fst.files.checkpoint import (
    check_file,
    check_sizes,
    load_checkpoint_safely,
    state_dict_in,
    state_dict_of,
)
from fst.files.records import Records, from_text, records_in

RECORDS = "fst.json"  # a .pt2 file's extra file, and the other formats' key, that holds the records
NAMES = "fst.names.json"  # an .onnx file's key: weight -> initializer, and whether it is transposed
PT2_CONFIG = "/data/weights/model_weights_config.json"
PT2_RECORDS = f"/extra/{RECORDS}"
PACKED = "_packed_params._packed_params"  # a quantised linear layer's key of (weight, bias)
PT2_DTYPES = {6: torch.float16, 7: torch.float32, 8: torch.float64, 13: torch.bfloat16}


class Stored(NamedTuple):
    """The contents of a file.

    Attributes:
        weights: its tensors by name; of a .pt2 file the floating-point ones.
        records: which of them must be N:M, where the file says so.
    """

    weights: dict[str, Tensor]
    records: Records


def read_stored(path: str | os.PathLike[str]) -> Stored:
    """The weights in a file, and their records.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or of another kind than its suffix says.
        ModuleNotFoundError: a package of the extra "export" is not installed.
    """
    path = Path(path).expanduser()
    if path.suffix not in READERS:
        checkpoint = load_checkpoint_safely(path)
        weights = state_dict_of(checkpoint, str(path)) | packed_weights(checkpoint)
        check_sizes(weights, path)
        return Stored(weights, records_in(checkpoint, str(path)))
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} does not exist or is no file.")
    try:
        found = READERS[path.suffix](path)
        if not found.weights:
            raise ValueError("it holds no weights")
        return found
    except ImportError:
        raise
    except Exception as error:  # of the many kinds of the libraries that read files
        reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        raise ValueError(
            f"{str(path)!r} is no {path.suffix} file, or damaged: {reason}."
        ) from error


def packed_weights(checkpoint: Any) -> dict[str, Tensor]:
    """The weights that torch.ao's quantised linear layers keep in one entry with their biases."""
    return {
        key.removeprefix("module.").replace(PACKED, "weight"): value[0]
        for key, value in state_dict_in(checkpoint).items()
        if isinstance(key, str) and key.endswith(PACKED) and isinstance(value, tuple)
    }


def _read_safetensors(path: Path) -> Stored:
    with extra_named():
        from safetensors import safe_open
    with safe_open(path, "pt") as file:
        records = from_text((file.metadata() or {}).get(RECORDS))
        return Stored({name: file.get_tensor(name) for name in file.keys()}, records)


def _read_onnx(path: Path) -> Stored:
    with extra_named():
        import onnx
    model = onnx.load(path)
    weights = {entry.name: _of_onnx(entry) for entry in model.graph.initializer}
    said = {entry.key: entry.value for entry in model.metadata_props}
    names: dict[str, tuple[str, bool]] = json.loads(said.get(NAMES, "{}"))
    renamed = {
        name: weights[stored].mT if transposed else weights[stored]
        for name, (stored, transposed) in names.items()
    }
    for stored, _ in names.values():
        weights.pop(stored, None)
    return Stored(weights | renamed, from_text(said.get(RECORDS)))


def _of_onnx(entry: Any) -> Tensor:
    from onnx import numpy_helper

    values = numpy_helper.to_array(entry)
    if values.dtype.name == "bfloat16":  # which torch does not take from NumPy
        return torch.tensor(values.astype("float32")).bfloat16()
    return torch.tensor(values)


def _read_pt2(path: Path) -> Stored:
    check_file(path)
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        entry = next((name for name in names if name.endswith(PT2_RECORDS)), None)
        records = from_text(archive.read(entry).decode() if entry else None)
        config = next((name for name in names if name.endswith(PT2_CONFIG)), None)
        if config is None:
            raise ValueError("it holds no weights as torch.export.save of PyTorch 2.9 writes them")
        weights = _weights_of_pt2(archive, config)
    check_sizes(weights, path)
    return Stored(weights, records)


def _weights_of_pt2(archive: zipfile.ZipFile, config: str) -> dict[str, Tensor]:
    """The floating-point weights that the record ``config`` lists."""
    weights, folder = {}, config.rpartition("/")[0]
    for name, entry in json.loads(archive.read(config))["config"].items():
        meta = entry["tensor_meta"]
        if entry["use_pickle"] or meta["dtype"] not in PT2_DTYPES:
            continue
        content = archive.read(f"{folder}/{entry['path_name']}")
        if content:
            flat = torch.frombuffer(bytearray(content), dtype=PT2_DTYPES[meta["dtype"]])
            size, stride = ([n["as_int"] for n in meta[key]] for key in ("sizes", "strides"))
            weights[name] = flat.as_strided(size, stride, meta["storage_offset"]["as_int"])
    return weights


READERS = {".safetensors": _read_safetensors, ".onnx": _read_onnx, ".pt2": _read_pt2}
