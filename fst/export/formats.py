"""Files of exported models: how each is written, what weights it holds, and what it computes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fst.basics.extras import extra_named

Inputs = tuple[Tensor, ...]


class Format(NamedTuple):
    """A kind of file.

    Attributes:
        write: model, inputs, whether the batch size may change, and the file.
        weights: the tensors in a file, by name.
        outputs: what a file computes of inputs; None where it does not compute, or nothing that
            could run it is installed.
        computes: whether the file holds more than weights, so that example inputs are needed.
    """

    write: Callable[[nn.Module, Inputs, bool, Path], None]
    weights: Callable[[Path], dict[str, Tensor]]
    outputs: Callable[[Path, Inputs], list[Any] | None]
    computes: bool = True


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
    program.save(path)


def _onnx_weights(path: Path) -> dict[str, Tensor]:
    with extra_named():
        import onnx
    held = onnx.load(path).graph.initializer
    return {entry.name: torch.tensor(onnx.numpy_helper.to_array(entry)) for entry in held}


def _onnx_outputs(path: Path, inputs: Inputs) -> list[Tensor] | None:
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    given = dict(zip(names, (value.numpy() for value in inputs), strict=True))
    return [torch.from_numpy(found) for found in session.run(None, given)]


def _write_pt2(model: nn.Module, inputs: Inputs, dynamic_batch: bool, path: Path) -> None:
    shapes = _dynamic(inputs, dynamic_batch)
    torch.export.save(torch.export.export(model, inputs, dynamic_shapes=shapes), path)


def _pt2_outputs(path: Path, inputs: Inputs) -> list[Any]:
    return pytree.tree_leaves(torch.export.load(path).module()(*inputs))


def _write_safetensors(model: nn.Module, inputs: Inputs, dynamic_batch: bool, path: Path) -> None:
    with extra_named():
        from safetensors.torch import save_file
    # clones: the format has no shared tensors, and a model's may be tied
    whole = {name: value.clone().contiguous() for name, value in model.state_dict().items()}
    save_file(whole, path, {"format": "pt"})


def _safetensors_weights(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


FORMATS = {
    ".onnx": Format(_write_onnx, _onnx_weights, _onnx_outputs),
    ".pt2": Format(_write_pt2, lambda path: torch.export.load(path).state_dict, _pt2_outputs),
    ".safetensors": Format(
        _write_safetensors, _safetensors_weights, lambda path, inputs: None, computes=False
    ),
}
