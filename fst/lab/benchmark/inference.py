"""Inference of a network on a CPU: torch, ONNX Runtime and packed models, in turns."""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fst import convert, export, fold, get_strategy, pack
from fst.backends.timing import LEAST_ROUNDS, Function, Timing, compare
from fst.lab.arguments import source_and_name
from fst.lab.model import CLASSES, SIZE, from_config, is_config
from fst.lab.reporting.document import Document, Table
from fst.layers.packed import LIBRARY, PackedLayer
from fst.models.named import build_architecture

EAGER, FROZEN = "torch", "torch.compile, freezing"
ORT, ORT_INT8 = "ONNX Runtime, float32", "ONNX Runtime, int8"
OWN = "dense, our kernel"
PATTERNS = ((2, 4), (1, 4))
RIVALS = (FROZEN, ORT)  # dense ones of the same precision, of which the faster one counts
SECONDS = 60.0  # of the slowest candidate's rounds


def measure_inference(options: argparse.Namespace) -> tuple[dict[int, dict[str, Timing]], dict]:
    """Times by batch size and candidate, and why candidates are missing: name -> reason."""
    times: dict[int, dict[str, Timing]] = {}
    missing: dict[str, str] = {}
    for batch in options.batch:
        model, images = network(options.infer, batch, options.size)
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            ready = candidates(model, images, Path(folder), missing)
            rounds = options.repeats or 15
            most = float("inf") if options.repeats else SECONDS * 1e3
            times[batch] = compare(ready, max(rounds, LEAST_ROUNDS), images.device, most=most)
    return times, missing


def network(name: str, batch: int, size: tuple[int, int] | None) -> tuple[nn.Module, Tensor]:
    """A dense model in evaluation mode, and random images for it."""
    torch.manual_seed(0)
    if is_config(name):
        from fst.training.engine.export import deployable

        training = from_config(name, batch, size)
        model, shape = deployable(training.model), training.batch_shape
    else:
        model = build_architecture(*source_and_name(name), num_classes=CLASSES)
        shape = (batch, 3, *(size or SIZE))
    return model.eval(), torch.randn(shape)


def candidates(
    model: nn.Module, images: Tensor, folder: Path, missing: dict[str, str]
) -> dict[str, Function]:
    """Each candidate's call; ``missing`` is told of those that cannot be made."""
    makers: dict[str, Callable[[], Function]] = {
        EAGER: lambda: _call(copy.deepcopy(model), images),
        FROZEN: lambda: _frozen(model, images),
        ORT: lambda: _onnxruntime(model, images, folder, int8=False),
        ORT_INT8: lambda: _onnxruntime(model, images, folder, int8=True),
        OWN: lambda: _own_kernel(model, images),
        **{f"{n}:{m} packed": _packer(model, images, n, m) for n, m in PATTERNS},
    }
    ready: dict[str, Function] = {}
    for name, make in makers.items():
        try:
            function = make()
            function()
            ready[name] = function
        except Exception as error:  # of programs of others, which fail in any way
            lines = str(error).strip().splitlines()
            missing[name] = f"{type(error).__name__}: {lines[0] if lines else ''}"
    return ready


def _call(model: nn.Module, images: Tensor) -> Function:
    return lambda: model(images)


def _frozen(model: nn.Module, images: Tensor) -> Function:
    """By inductor, which may change the weights' layout."""
    with torch._inductor.config.patch(freezing=True):
        compiled = torch.compile(copy.deepcopy(model))
        compiled(images)
    return lambda: compiled(images)


def _onnxruntime(model: nn.Module, images: Tensor, folder: Path, int8: bool) -> Function:
    import onnxruntime

    file = folder / "model.onnx"
    if not file.is_file():
        export(model, file, images, dynamic_batch=False)
    names = [entry.name for entry in _session(onnxruntime, file).get_inputs()]
    given = {names[0]: images.numpy()}
    if int8:
        file = _quantised(file, given)
    session = _session(onnxruntime, file)
    return lambda: session.run(None, given)


def _session(onnxruntime: Any, file: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _quantised(file: Path, given: dict[str, Any]) -> Path:
    """Weights and activations of int8, calibrated on the batch."""
    from onnxruntime import quantization as q

    class Batch(q.CalibrationDataReader):
        left = [given]

        def get_next(self) -> dict[str, Any] | None:
            return self.left.pop() if self.left else None

    prepared, out = file.with_name("prepared.onnx"), file.with_name("int8.onnx")
    q.quant_pre_process(str(file), str(prepared), skip_symbolic_shape=True)
    q.quantize_static(str(prepared), str(out), Batch(), per_channel=True)
    return out


def _own_kernel(model: nn.Module, images: Tensor) -> Function:
    """No weight is zero, and each layer runs by the kernels by zeros where they can."""
    packed = pack(model, images)
    for layer in packed.modules():
        if isinstance(layer, PackedLayer):
            layer.only_library = False
            for key, times in layer.times.items():
                ours = {lanes: t.median for lanes, t in times.items() if lanes != LIBRARY}
                if ours:
                    layer.chosen[key] = min(ours, key=ours.__getitem__)
    return _call(packed, images)


def _packer(model: nn.Module, images: Tensor, n: int, m: int) -> Callable[[], Function]:
    def make() -> Function:
        pruned = copy.deepcopy(model)
        convert(pruned, get_strategy("srste", n=n, m=m), layers="all")
        return _call(pack(fold(pruned), images), images)

    return make


def describe_inference(
    header: dict[str, Any], times: dict[int, dict[str, Timing]], missing: dict[str, str]
) -> Document:
    """The report: a table for each batch size."""
    made = [[key, str(value)] for key, value in header.items() if key != "command"]
    tables = [Table("measured with", ["what", "value"], made)]
    for batch, found in times.items():
        rivals = [found[name].median for name in RIVALS if name in found]
        best = min(rivals) if rivals else found[EAGER].median
        rows = [
            [
                name,
                str(timing),
                f"{found[EAGER].median / timing.median:.2f}",
                f"{best / timing.median:.2f}",
            ]
            for name, timing in found.items()
        ]
        columns = ["candidate", "ms (quartiles)", "torch's time / time", "best rival's / time"]
        caption = f"The best rival is the faster one of: {'; '.join(RIVALS)}."
        tables.append(Table(f"inference, batch {batch}", columns, rows, caption))
    notes = [f"{name}: not run. {why}" for name, why in missing.items()]
    return Document("Inference side by side", "", header["command"], {}, tables, [], notes)
