"""Inference of a network on a CPU: torch, inference engines and packed models, in turns."""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fst import convert, export, fold, get_strategy, pack
from fst.api.difference import difference
from fst.backends.timing import LEAST_ROUNDS, Function, Timing, compare
from fst.basics.extras import extra_named
from fst.inference.packed import packed_layers
from fst.lab.document import Document, Table
from fst.lab.model import CLASSES, SIZE, from_config, is_config
from fst.ops.backends.packed import LANES
from fst.training.architecture import named_model

EAGER, FROZEN = "torch", "torch.compile, freezing"
ORT, ORT_INT8 = "ONNX Runtime, float32", "ONNX Runtime, int8"
OPENVINO = "OpenVINO, float32"
OWN = "dense, our kernel"
PATTERNS = ((2, 4), (1, 4))
PACKED = tuple(f"{n}:{m} packed" for n, m in PATTERNS)
CANDIDATES = (EAGER, FROZEN, ORT, ORT_INT8, OPENVINO, OWN, *PACKED)
RIVALS = (FROZEN, ORT, OPENVINO)  # dense ones of the same precision, of which the fastest counts
ENGINES = ("onnxruntime", "openvino")
ROUNDS = 15
SECONDS = 6.0  # of the slowest candidate's rounds


@dataclass(frozen=True)
class Inference:
    """The times of one batch size with one number of threads.

    Attributes:
        batch: images.
        threads: of each candidate.
        times: of each of CANDIDATES that ran.
        differences: largest difference of a candidate's outputs from those of the plain model with
            the same weights, relative to the largest value of that output.
        missing: why the others did not run.
    """

    batch: int
    threads: int
    times: dict[str, Timing]
    differences: dict[str, float | None]
    missing: dict[str, str]

    @property
    def best_rival(self) -> str:
        """The fastest of RIVALS; torch where none ran."""
        ran = [name for name in RIVALS if name in self.times]
        return min(ran, key=lambda name: self.times[name].median, default=EAGER)

    def gain(self, name: str) -> float:
        """Time of the best rival / time of a candidate."""
        return self.times[self.best_rival].median / self.times[name].median

    def as_json(self) -> dict[str, Any]:
        """Numbers and texts."""
        return {**asdict(self), "times": {n: t._asdict() for n, t in self.times.items()}}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Inference:
        """Read what `as_json` has made."""
        return cls(**{**found, "times": {n: Timing(**t) for n, t in found["times"].items()}})


class Candidate(NamedTuple):
    """A call that computes the network, and how far its outputs are from the plain ones."""

    call: Function
    difference: float | None


def measure_inference(options: argparse.Namespace) -> list[Inference]:
    """Each batch size, with each number of threads."""
    found = []
    for batch in options.batch:
        model, images = network(options.infer, batch, options.size)
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            for threads in options.threads or [torch.get_num_threads()]:
                torch.set_num_threads(threads)
                missing: dict[str, str] = {}
                ready = candidates(model, images, Path(folder), missing)
                calls = {name: candidate.call for name, candidate in ready.items()}
                rounds = max(options.repeats or ROUNDS, LEAST_ROUNDS)
                most = float("inf") if options.repeats else SECONDS * 1e3
                times = compare(calls, rounds, images.device, warmup=1, most=most)
                differences = {name: candidate.difference for name, candidate in ready.items()}
                found.append(Inference(batch, threads, times, differences, missing))
    return found


def engine_versions() -> dict[str, str]:
    """Of those of ENGINES that are installed."""
    installed = filter(importlib.util.find_spec, ENGINES)
    return {name: importlib.metadata.version(name) for name in installed}


def network(name: str, batch: int, size: tuple[int, int] | None) -> tuple[nn.Module, Tensor]:
    """A dense model in evaluation mode, and random images for it."""
    torch.manual_seed(0)
    if is_config(name):
        from fst.training.engine.export import deployable

        training = from_config(name, batch, size)
        model, shape = deployable(training.model), training.batch_shape
    else:
        model = named_model(name, num_classes=CLASSES)
        shape = (batch, 3, *(size or SIZE))
    return model.eval(), torch.randn(shape)


def candidates(
    model: nn.Module, images: Tensor, folder: Path, missing: dict[str, str]
) -> dict[str, Candidate]:
    """Those of CANDIDATES that can run; ``missing`` is told why the others cannot.

    Args:
        folder: for the files of inference engines; those that are there are of this model.
    """
    expected = model(images)
    makers: dict[str, Callable[[], Function]] = {
        EAGER: lambda: _call(copy.deepcopy(model), images),
        FROZEN: lambda: _frozen(model, images),
        ORT: lambda: _onnxruntime(_onnx_file(model, images, folder), images),
        ORT_INT8: lambda: _onnxruntime(_int8_file(model, images, folder), images),
        OPENVINO: lambda: _openvino(_onnx_file(model, images, folder), images),
    }
    packers: dict[str, Callable[[], nn.Module]] = {
        OWN: lambda: _own_kernel(model, images),
        **{f"{n}:{m} packed": _packer(model, images, n, m) for n, m in PATTERNS},
    }
    ready: dict[str, Candidate] = {}
    for name in CANDIDATES:
        try:
            with extra_named():
                if name in packers:
                    packed = packers[name]()
                    apart = packed.report.difference  # type: ignore[union-attr]  # of fst.pack
                    ready[name] = Candidate(_call(packed, images), apart)
                else:
                    call = makers[name]()
                    found = pytree.tree_map(torch.as_tensor, call())
                    ready[name] = Candidate(call, difference(found, expected))
        except Exception as error:  # of programs of others, which fail in any way
            lines = str(error).strip().splitlines()
            missing[name] = f"{type(error).__name__}: {lines[0] if lines else ''}"
    return ready


def _call(model: nn.Module, images: Tensor) -> Function:
    return lambda: model(images)


def _frozen(model: nn.Module, images: Tensor) -> Function:
    """By inductor, which may change the weights' layout."""
    torch._dynamo.reset()  # what it made for another number of threads
    with torch._inductor.config.patch(freezing=True, force_disable_caches=True):
        compiled = torch.compile(copy.deepcopy(model))
        compiled(images)
    return lambda: compiled(images)


def _onnx_file(model: nn.Module, images: Tensor, folder: Path) -> Path:
    file = folder / "model.onnx"
    if not file.is_file():
        export(model, file, images, dynamic_batch=False)
    return file


def _int8_file(model: nn.Module, images: Tensor, folder: Path) -> Path:
    """Weights and activations of int8, calibrated on the batch."""
    from onnxruntime import quantization as q

    file, prepared = folder / "int8.onnx", folder / "prepared.onnx"
    if file.is_file():
        return file
    source = _onnx_file(model, images, folder)
    name = _session(source).get_inputs()[0].name

    class Batch(q.CalibrationDataReader):
        left = [{name: images.numpy()}]

        def get_next(self) -> dict[str, Any] | None:
            return self.left.pop() if self.left else None

    q.quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
    q.quantize_static(str(prepared), str(file), Batch(), per_channel=True)
    return file


def _onnxruntime(file: Path, images: Tensor) -> Function:
    session = _session(file)
    given = {session.get_inputs()[0].name: images.numpy()}
    return lambda: session.run(None, given)


def _session(file: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    # its threads would spin on while the next candidate runs
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _openvino(file: Path, images: Tensor) -> Function:
    import openvino

    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": "f32",  # else bfloat16 where the processor has it
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = openvino.Core().compile_model(str(file), "CPU", settings).create_infer_request()
    given = images.numpy()

    def call() -> list[Any]:
        found = request.infer([given], share_inputs=True, share_outputs=True)
        return list(found.values())

    return call


def _own_kernel(model: nn.Module, images: Tensor) -> nn.Module:
    """No weight is zero, and each layer runs by the kernels by zeros where they can."""
    packed = pack(model, images)
    for layer in packed_layers(packed).values():
        layer.plans.only(*LANES)
    return packed


def _packer(model: nn.Module, images: Tensor, n: int, m: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        pruned = copy.deepcopy(model)
        convert(pruned, get_strategy("srste", n=n, m=m), layers="all")
        return pack(fold(pruned), images)

    return make


def describe_inference(header: dict[str, Any], found: list[Inference]) -> Document:
    """The report: a table for each batch size and number of threads."""
    made = [[key, str(value)] for key, value in header.items() if key != "command"]
    tables = [Table("measured with", ["what", "value"], made)]
    columns = ["candidate", "ms (quartiles)", "torch's time / time", "best rival's / time"]
    for one in found:
        rows = [
            [
                name,
                str(timing),
                f"{one.times[EAGER].median / timing.median:.2f}",
                f"{one.gain(name):.2f}",
                "-" if one.differences[name] is None else f"{one.differences[name]:.0e}",
            ]
            for name, timing in one.times.items()
        ]
        caption = f"The best rival is the fastest one of: {'; '.join(RIVALS)}."
        title = f"inference, batch {one.batch}, {one.threads} thread(s)"
        tables.append(Table(title, [*columns, "outputs differ by"], rows, caption))
    notes = {f"{name}: not run. {why}" for one in found for name, why in one.missing.items()}
    return Document("Inference side by side", "", header["command"], "", tables, [], sorted(notes))
