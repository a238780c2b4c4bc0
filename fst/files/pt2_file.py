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
DTYPES = {6: torch.float16, 7: torch.float32, 8: torch.float64, 13: torch.bfloat16}


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
        ValueError: it holds no weights, or a PyTorch before 2.9 wrote the file.
    """
    check_file(path)
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        entry = next((name for name in names if name.endswith(f"/extra/{RECORDS}")), None)
        records = from_text(archive.read(entry).decode() if entry else None)
        config = next((name for name in names if name.endswith(CONFIG)), None)
        if config is None:
            raise ValueError("it holds no weights as PyTorch 2.9 and newer ones write them")
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
