"""Files of exported models: how each is written, and what it computes."""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fst.basics.extras import extra_named
from fst.files.records import as_text, records_of
from fst.files.weights import NAMES, RECORDS

Inputs = tuple[Tensor, ...]


class Format(NamedTuple):
    """A kind of file.

    Attributes:
        write: model, inputs, whether the batch size may change, and the file.
        outputs: what a file computes of inputs; None where it does not compute, or nothing that
            could run it is installed.
        unoptimised: the same as ``outputs``, of each operation as the file has it; None where they
            are that anyway.
        computes: whether the file holds more than weights, so that example inputs are needed.
    """

    write: Callable[[nn.Module, Inputs, bool, Path], None]
    outputs: Callable[[Path, Inputs], list[Any] | None]
    computes: bool = True
    unoptimised: Callable[[Path, Inputs], list[Any] | None] | None = None


def _dynamic(inputs: Inputs, dynamic_batch: bool) -> tuple[dict[int, object], ...] | None:
    return tuple({0: torch.export.Dim("batch")} for _ in inputs) if dynamic_batch else None


def _write_onnx(model: nn.Module, inputs: Inputs, dynamic_batch: bool, path: Path) -> None:
    with extra_named():
        import onnxscript  # noqa: F401
    for index, value in enumerate(inputs):
        if value.dtype == torch.bfloat16:  # NumPy has none, so the file could not be run
            raise ValueError(
                f"example_input[{index}] is torch.bfloat16, in which no .onnx file can be "
                "compared: export the model and the input in float32 or float16, or a .pt2 file."
            )
    shapes = _dynamic(inputs, dynamic_batch)
    program = torch.onnx.export(model, inputs, dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None  # of the exporter that makes no file itself
    stored = {
        name: torch.tensor(entry.const_value.numpy())
        for name, entry in program.model.graph.initializers.items()
        if entry.const_value is not None
    }
    records = records_of(model)
    found = {name: held_as(name, model.get_parameter(name).detach(), stored) for name in records}
    names = {name: where for name, where in found.items() if where is not None}
    program.model.metadata_props.update({RECORDS: as_text(records), NAMES: json.dumps(names)})
    program.save(path)
    if len(list(path.parent.iterdir())) > 1:
        raise ValueError(
            f"path={path.name!r}: the model is too large for a single .onnx file (about 1.5 GB): "
            "write a .pt2 or .safetensors file."
        )


def _onnx_outputs(path: Path, inputs: Inputs, optimised: bool = True) -> list[Tensor] | None:
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    options = onnxruntime.SessionOptions()
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    given = dict(zip(names, (value.numpy() for value in inputs), strict=True))
    return [torch.from_numpy(found) for found in session.run(None, given)]


def _write_pt2(model: nn.Module, inputs: Inputs, dynamic_batch: bool, path: Path) -> None:
    shapes = _dynamic(inputs, dynamic_batch)
    program = torch.export.export(model, inputs, dynamic_shapes=shapes)
    write_program(program, path, {RECORDS: as_text(records_of(model))})


def write_program(
    program: torch.export.ExportedProgram, path: Path, extra_files: dict[str, str] | None = None
) -> None:
    """`torch.export.save`, but where the disk is full an error, not the end of the process."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files=extra_files)
    path.write_bytes(buffer.getbuffer())


def _pt2_outputs(path: Path, inputs: Inputs) -> list[Any]:
    return pytree.tree_leaves(torch.export.load(path).module()(*inputs))


def _write_safetensors(model: nn.Module, inputs: Inputs, dynamic_batch: bool, path: Path) -> None:
    with extra_named():
        from safetensors.torch import save
    # clones: the format has no shared tensors, and a model's may be tied
    whole = {name: value.clone().contiguous() for name, value in model.state_dict().items()}
    path.write_bytes(save(whole, {"format": "pt", RECORDS: as_text(records_of(model))}))


def held_as(name: str, weight: Tensor, stored: Mapping[str, Tensor]) -> tuple[str, bool] | None:
    """The name of a weight in a file, and whether it is transposed there; None if it is not held.

    Exporters rename what they share or transpose.
    """
    held = stored.get(name)
    if held is not None and held.shape == weight.shape:
        return name, False
    for key, value in stored.items():
        if value.dim() == weight.dim():
            for transposed in (False, True):
                if torch.equal(value.mT if transposed else value, weight):
                    return key, transposed
    return None


FORMATS = {
    ".onnx": Format(
        _write_onnx, _onnx_outputs, unoptimised=partial(_onnx_outputs, optimised=False)
    ),
    ".pt2": Format(_write_pt2, _pt2_outputs),
    ".safetensors": Format(_write_safetensors, lambda path, inputs: None, computes=False),
}
