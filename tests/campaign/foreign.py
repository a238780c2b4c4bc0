"""`fst.verify` says of a file what it says of the model, whatever tool wrote or changed it."""

from __future__ import annotations

import math
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fst
from fst.api.verify import VerifyReport
from tests.campaign.shared import Checks

Writer = Callable[[random.Random, nn.Module, Tensor, Path], Path]
Kinds = Counter[tuple[tuple[int, ...], bool]]


def checks() -> Checks:
    """Files of each tool."""
    return [(name, 8, partial(_check, name)) for name in WRITERS]


class Net(nn.Module):
    """Convolutions, linear layers on tokens and one on rows; some of the weights are 2:4."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        width, groups = draw.choice((8, 16)), draw.choice((1, 2))
        self.first = nn.Conv2d(4, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, draw.choice((1, 3)), groups=groups)
        self.tokens, self.head = nn.Linear(width, 12), nn.Linear(12, 20)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.second(self.first(images).relu())
        return self.head(self.tokens(maps.flatten(2).transpose(1, 2)).relu().mean(1))


def _torch(draw: random.Random, model: nn.Module, images: Tensor, path: Path) -> Path:
    state = model.state_dict()
    if draw.random() < 0.5:
        state = {f"module.{name}": value for name, value in state.items()}
    key = draw.choice(("", "state_dict", "model"))
    torch.save(
        {key: state, "epoch": 3} if key else state,
        path := path / "m.pth",
        _use_new_zipfile_serialization=draw.random() < 0.5,
    )
    return path


def _safetensors(draw: random.Random, model: nn.Module, images: Tensor, path: Path) -> Path:
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))
    save_file(
        {n: v.to(dtype) for n, v in model.state_dict().items()}, path := path / "m.safetensors"
    )
    return path


def _onnx(draw: random.Random, model: nn.Module, images: Tensor, path: Path) -> Path:
    torch.onnx.export(
        model, (images,), path := path / "m.onnx", dynamo=draw.random() < 0.5, verbose=False
    )
    return path


def _renamed(draw: random.Random, model: nn.Module, images: Tensor, path: Path) -> Path:
    import onnx

    program = onnx.load(path := _onnx(draw, model, images, path))
    names = {entry.name: f"t{n}" for n, entry in enumerate(program.graph.initializer)}
    for entry in program.graph.initializer:
        entry.name = names[entry.name]
    for node in program.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    onnx.save(program, path, save_as_external_data=draw.random() < 0.5, size_threshold=64)
    return path


def _optimised(draw: random.Random, model: nn.Module, images: Tensor, path: Path) -> Path:
    import onnxruntime

    options, written = onnxruntime.SessionOptions(), path / "o.onnx"
    level = draw.choice(("BASIC", "EXTENDED", "ALL"))
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = getattr(levels, f"ORT_ENABLE_{level}")
    options.optimized_model_filepath = str(written)
    source = _onnx(draw, model, images, path)
    onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return written


class _Images:
    def __init__(self, name: str, images: Tensor) -> None:
        self.given = iter([{name: images.numpy()}])

    def get_next(self) -> object:
        return next(self.given, None)


def _quantised(draw: random.Random, model: nn.Module, images: Tensor, path: Path) -> Path:
    import onnx
    from onnxruntime.quantization import QuantFormat, quantize_static

    source, written = _onnx(draw, model, images, path), path / "q.onnx"
    program = onnx.load(source)
    nodes = [node.name for node in program.graph.node if node.op_type in ("Conv", "MatMul", "Gemm")]
    quantize_static(
        *(source, written, _Images(program.graph.input[0].name, images)),
        quant_format=draw.choice((QuantFormat.QDQ, QuantFormat.QOperator)),
        nodes_to_exclude=draw.sample(nodes, draw.randint(1, len(nodes))),
    )
    return written


WRITERS: dict[str, Writer] = {
    "torch": _torch,
    "safetensors": _safetensors,
    "onnx": _onnx,
    "renamed": _renamed,
    "optimised": _optimised,
    "quantised": _quantised,
}


def _kinds(report: VerifyReport) -> Kinds:
    """How many of the checked weights have a shape and a verdict."""
    return Counter((tuple(n for n in r.shape if n > 1), r.ok) for r in report.layers)


def _check(name: str, draw: random.Random) -> None:
    torch.manual_seed(draw.getrandbits(32))
    model = Net(draw).eval().requires_grad_(False)
    if names := [name for name, _ in model.named_children() if draw.random() < 0.6]:
        fst.convert(model, "srste", include=names)
        model = fst.fold(model)
    images = torch.randn(2, 4, 6, 6)
    with tempfile.TemporaryDirectory() as folder:
        found = fst.verify(WRITERS[name](draw, model, images, Path(folder)), 2, 4, include="*")
    expected = fst.verify(model, 2, 4, include="*")
    extra = _kinds(found) - _kinds(expected)
    assert not extra, f"{found}\n\nof the model:\n{expected}"
    if not found.unread:
        assert _kinds(found) == _kinds(expected), f"{found}\n\nof the model:\n{expected}"
        assert name in ("torch", "safetensors") or math.isclose(found.coverage, expected.coverage)
