"""Files of `torch.export`: written and run by torch, read without running code from them."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fst.files.checkpoint import check_file, check_sizes
from fst.files.options import Inputs, Options
from fst.files.records import RECORDS, Stored, as_text, from_text, records_of

CONFIG = "/data/weights/model_weights_config.json"
OLDER = ("serialized_state_dict.pt", "/data/weights/model.pt", "/models/model.json")
DTYPES = {6: torch.float16, 7: torch.float32, 8: torch.float64, 13: torch.bfloat16}


class OldFileError(ValueError):
    """A whole file, of a version whose contents cannot be read without running them."""


def write(model: nn.Module, inputs: Inputs, options: Options, path: Path) -> None:
    """Write the program, with the records as an extra file in it."""
    program = torch.export.export(model, inputs, dynamic_shapes=options.shapes(inputs))
    write_program(program, path, {RECORDS: as_text(records_of(model))})


def write_program(
    program: torch.export.ExportedProgram, path: Path, extra_files: dict[str, str] | None = None
) -> None:
    """`torch.export.save`, but where the disk is full an error, not the end of the process."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files=extra_files)
    path.write_bytes(buffer.getbuffer())


def outputs(path: Path, inputs: Inputs) -> list[Any]:
    """Outputs of the program."""
    return pytree.tree_leaves(torch.export.load(path).module()(*inputs))


def read(path: Path) -> Stored:
    """The floating-point weights.

    Raises:
        ValueError: a PyTorch before 2.9 wrote the file (`OldFileError`), or it holds no weights.
    """
    check_file(path)
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        entry = next((name for name in names if name.endswith(f"/extra/{RECORDS}")), None)
        records = from_text(archive.read(entry).decode() if entry else None)
        config = next((name for name in names if name.endswith(CONFIG)), None)
        if config is None and any(name.endswith(OLDER) for name in names):
            raise OldFileError(
                f"{str(path)!r} was written by a PyTorch before 2.9: its weights are read of files "
                "that torch.export.save of PyTorch 2.9 or newer writes."
            )
        if config is None:
            raise ValueError("it holds no weights")
        weights = _weights(archive, config)
    check_sizes(weights, path)
    return Stored(weights, records)


def _weights(archive: zipfile.ZipFile, config: str) -> dict[str, Tensor]:
    """The floating-point weights that the record ``config`` lists."""
    weights, folder = {}, config.rpartition("/")[0]
    for name, entry in json.loads(archive.read(config))["config"].items():
        meta = entry["tensor_meta"]
        if entry["use_pickle"] or meta["dtype"] not in DTYPES:
            continue
        content = archive.read(f"{folder}/{entry['path_name']}")
        if content:
            flat = torch.frombuffer(bytearray(content), dtype=DTYPES[meta["dtype"]])
            size, stride = ([n["as_int"] for n in meta[key]] for key in ("sizes", "strides"))
            weights[name] = flat.as_strided(size, stride, meta["storage_offset"]["as_int"])
    return weights
