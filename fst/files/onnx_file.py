"""Files of ONNX: written by torch's exporters, run by onnxruntime, read by what nodes do."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fst.basics.extras import extra_named
from fst.files.options import Inputs, Options
from fst.files.records import (
    RECORDS,
    Stored,
    as_text,
    from_text,
    outputs_first,
    records_of,
)

NAMES = "fst.names.json"  # metadata: weight -> initializer, and whether it is transposed there
REORDERED = "reordered, not checked"
LEAST_DYNAMO = 18  # opset of torch's new exporter; it converts to lower ones in rare cases only
WEIGHT_INPUT = {"QLinearConv": 3, "QLinearMatMul": 3, "QGemm": 3}  # of other operations: 1
KEEPS_ELEMENTS = ("Identity", "Cast", "QuantizeLinear", "DequantizeLinear", "Transpose")


def write(model: nn.Module, inputs: Inputs, options: Options, path: Path) -> None:
    """Write the graph, and the records and names of the weights as its metadata.

    Raises:
        ValueError: the inputs or the model cannot be written so.
    """
    with extra_named():
        import onnx
        import onnxscript  # noqa: F401
    for index, value in enumerate(inputs):
        if value.dtype == torch.bfloat16:  # NumPy has none, so the file could not be run
            raise ValueError(
                f"example_input[{index}] is torch.bfloat16, in which no .onnx file can be "
                "compared: export the model and the input in float32 or float16, or a .pt2 file."
            )
    _write_graph(model, inputs, options, path)
    if len(list(path.parent.iterdir())) > 1:
        raise ValueError(
            f"path={path.name!r}: the model is too large for a single .onnx file (about 1.5 GB): "
            "write a .pt2 or .safetensors file."
        )
    program = onnx.load(path)
    stored, layers = tensors_of(program.graph), dict(layer_weights(program.graph))
    stored |= {name: weight for name, (weight, _) in layers.items()}
    names, free = {}, dict(stored)  # two weights may be equal, as those that begin as zeros
    for name, value in model.state_dict().items():
        held = _held_as(name, value, free) or _held_as(name, value, stored)
        if held is not None and value.dim() > 1:
            names[name] = (held, False)
            free.pop(held, None)
    said = {entry.key: entry.value for entry in program.metadata_props}
    said |= {RECORDS: as_text(records_of(model)), NAMES: json.dumps(names)}
    onnx.helper.set_model_props(program, said)
    onnx.save(program, path)


def _write_graph(model: nn.Module, inputs: Inputs, options: Options, path: Path) -> None:
    opset = options.opset
    if opset is None or opset >= LEAST_DYNAMO:
        shapes = options.shapes(inputs)
        program = torch.onnx.export(
            model, inputs, dynamo=True, dynamic_shapes=shapes, opset_version=opset, verbose=False
        )
        assert program is not None  # of the exporter that makes no file itself
        written = program.model.opset_imports[""]
        if opset not in (None, written):
            raise ValueError(f"opset={opset}: the exporter cannot write it (it wrote {written}).")
        program.save(path)
        return
    try:
        _write_by_tracing(model, inputs, options, opset, path)
    except Exception as error:  # of many kinds
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"opset={opset}: the exporter cannot write this model with it ({reason}). "
            f"{_least(model, inputs, options, opset + 1, path)}."
        ) from error


def _least(model: nn.Module, inputs: Inputs, options: Options, first: int, path: Path) -> str:
    """The least opset from ``first`` on that the model can be written with, in words."""
    for opset in range(first, LEAST_DYNAMO):
        try:
            _write_by_tracing(model, inputs, options, opset, path)
        except Exception:  # of many kinds
            continue
        return f"The least opset that it takes is {opset}"
    return f"None below {LEAST_DYNAMO} can, from which on another exporter writes it"


def _write_by_tracing(
    model: nn.Module, inputs: Inputs, options: Options, opset: int, path: Path
) -> None:
    """By torch's old exporter; weights stay as they are, so that they can be found."""
    names = [f"input_{index}" if index else "input" for index in range(len(inputs))]
    axes = [options.axes(value) for value in inputs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            inputs,
            path,
            dynamo=False,
            opset_version=opset,
            input_names=names,
            dynamic_axes=dict(zip(names, axes, strict=True)),
            training=torch.onnx.TrainingMode.PRESERVE,
        )


def outputs(path: Path, inputs: Inputs, optimised: bool = True) -> list[Tensor] | None:
    """Outputs of onnxruntime; None where it is not installed."""
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


def read(path: Path) -> Stored:
    """The weights as their layers multiply by them: (Cout, Cin/groups, ...)."""
    with extra_named():
        import onnx
    program = onnx.load(path)
    weights, layers = tensors_of(program.graph), dict(layer_weights(program.graph))
    said = {entry.key: entry.value for entry in program.metadata_props}
    names: dict[str, tuple[str, bool]] = json.loads(said.get(NAMES, "{}"))
    named = {}
    for name, (held, transposed) in names.items():
        if held in layers:
            named[name], layers[name] = layers[held][0], layers[held]
        elif held in weights:
            named[name] = weights[held].mT if transposed else weights[held]
    for held, _ in names.values():
        if held not in named:
            weights.pop(held, None)
            layers.pop(held, None)
    weights |= {name: weight for name, (weight, _) in layers.items()} | named
    records = from_text(said.get(RECORDS))
    return Stored(
        weights,
        {name: groups for name, groups in records.items() if name in weights},
        layers=frozenset(layers),
        unread={name: reason for name, (_, reason) in layers.items() if reason},
        lost=tuple(name for name in records if name not in weights),
    )


def tensors_of(graph: Any) -> dict[str, Tensor]:
    """The initializers, and the values of Constant nodes."""
    found = {entry.name: _tensor(entry) for entry in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            found[node.output[0]] = _tensor(node.attribute[0].t)
    return found


def _tensor(entry: Any) -> Tensor:
    from onnx import numpy_helper

    values = numpy_helper.to_array(entry)
    kind = values.dtype.name
    if kind == "bfloat16":
        return torch.tensor(values.astype("float32")).bfloat16()
    if kind.startswith(("float8", "float4")):  # torch takes none of these from NumPy
        return torch.tensor(values.astype("float32"))
    if kind.endswith(("int4", "int2")):
        return torch.tensor(values.astype("int8"))
    return torch.tensor(values)


def layer_weights(graph: Any) -> Iterator[tuple[str, tuple[Tensor, str]]]:
    """Each tensor that a convolution or a product of matrices multiplies by.

    The node says which axis is summed: that of the result is the second one.

    Yields:
        Its name, the weight (Cout, Cin/groups, ...), and why its values cannot be checked, or "".
    """
    from onnx import helper

    tensors = tensors_of(graph)
    makers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        said = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        kind, right = node.op_type, WEIGHT_INPUT.get(node.op_type, 1)
        is_product = "MatMul" in kind or kind in ("Gemm", "FusedGemm", "QGemm", "Attention")
        if not is_product and "Conv" not in kind:
            continue
        for index in (0, right) if is_product else (right,):
            name, weight = _held(node.input[index], tensors, makers)
            if weight is None or weight.dim() < 2:
                continue
            if kind == "ConvTranspose":
                weight = outputs_first(weight, said.get("group", 1))
            elif is_product:
                is_right = index == right
                if is_right != bool(said.get("transB" if is_right else "transA", 0)):
                    weight = weight.mT
                weight = weight.flatten(0, -2)
            yield name, (weight, REORDERED if node.domain == "com.microsoft.nchwc" else "")


def _held(
    name: str, tensors: Mapping[str, Tensor], makers: Mapping[str, Any]
) -> tuple[str, Tensor | None]:
    """The stored tensor whose elements a value has, and its name."""
    node = makers.get(name)
    if name in tensors or node is None or node.op_type not in KEEPS_ELEMENTS:
        return name, tensors.get(name)
    held, weight = _held(node.input[0], tensors, makers)
    if weight is not None and node.op_type == "Transpose":
        axes = next((entry.ints for entry in node.attribute if entry.name == "perm"), None)
        weight = weight.permute(*(axes or reversed(range(weight.dim()))))
    return held, weight


def _held_as(name: str, weight: Tensor, stored: Mapping[str, Tensor]) -> str | None:
    """The name of a weight in a file, which renames what is shared; None if it is not held."""
    held = stored.get(name)
    if held is not None and held.shape == weight.shape:
        return name
    alike = (key for key, value in stored.items() if value.dtype == weight.dtype)
    return next((key for key in alike if torch.equal(stored[key], weight)), None)
