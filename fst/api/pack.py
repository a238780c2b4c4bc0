"""`pack`: a model for inference on a CPU, whose layers leave out the zeros of their weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fst.api.fold import fold
from fst.backends.timing import Timing, compare
from fst.basics.errors import UsageError
from fst.basics.machine import processor
from fst.basics.text import table
from fst.basics.values import check_module, one_of
from fst.layers.calls import LayerCall, called_on, each_call
from fst.layers.chained import APART, TOGETHER, Chain, chain_depthwise
from fst.layers.fused import fuse, trace
from fst.layers.modules import sparse_layers
from fst.layers.packed import (
    LIBRARY,
    WAYS,
    PackedLayer,
    pack_layer,
    refuses_packing,
)
from fst.ops.cpp.library import KINDS, missing
from fst.ops.cpp.zeros_weight import ACTIVATIONS

NOTHING_GAINED = "nothing gained here"
REPEATS, MOST_MS = 7, 4_000.0  # of the whole model's timing
LARGEST_DIFFERENCE = {  # of an output, relative to its largest value
    torch.float32: 1e-4,
    torch.bfloat16: 0.1,
    torch.float16: 0.02,
}
SAME = 1e-5  # of a trace's output, which computes what the model does
CHAIN_HEADER = ("layers", "one by one, ms", "in one go, ms", "run")
PLAIN, DENSE, PACKED = "plain", "dense, batch norm folded", "packed"


@dataclass(frozen=True)
class PackedRow:
    """A layer of a packed model, for the example input.

    Attributes:
        name: in the model.
        shape: of the weight.
        density: share of the weight that is not zero, 0 to 1.
        follows: what became part of the layer: "batch norm", "residual", an activation.
        runs: one of WAYS.
        library: milliseconds of the library's product, all that follows included; None where
            nothing was timed.
        zeros: milliseconds of the fastest product by zeros; None where it cannot run.
        reason: why the layer is not packed; "" if it is.
    """

    name: str
    shape: tuple[int, ...]
    density: float
    follows: tuple[str, ...] = ()
    runs: str = WAYS[LIBRARY]
    library: Timing | None = None
    zeros: Timing | None = None
    reason: str = ""


@dataclass(frozen=True)
class ChainRow:
    """Layers of a packed model that can be computed in one go, for the example input.

    Attributes:
        layers: names, in order; one of the layers is depthwise.
        apart: milliseconds of all of them, one by one; None where nothing was timed.
        together: milliseconds in one go.
        runs: APART or TOGETHER.
    """

    layers: tuple[str, ...]
    apart: Timing | None
    together: Timing | None
    runs: str


@dataclass(frozen=True)
class PackReport:
    """Times and choices of `pack`; ``str()`` is a table of the layers and the verdict.

    Attributes:
        layers: in the order of the model, each as it runs where it is computed alone.
        chains: layers around a depthwise one, as they run together.
        times: milliseconds of the whole model: as it was given ("plain"), packed but without zeros
            left out ("dense, batch norm folded"), and "packed".
        difference: largest difference between the outputs and the plain model's, relative to the
            largest value of that output; None where no output is a tensor.
        shapes: of the example input.
        dtype: of the products.
        threads: of torch.
    """

    layers: tuple[PackedRow, ...]
    chains: tuple[ChainRow, ...]
    times: dict[str, Timing]
    difference: float | None
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    threads: int

    @property
    def gained(self) -> bool:
        """True if some layer does not run by the library: the model is faster then."""
        zeros = any(row.runs != WAYS[LIBRARY] for row in self.layers)
        return zeros or any(row.runs == TOGETHER for row in self.chains)

    @property
    def verdict(self) -> str:
        """The whole model's times in words."""
        packed, dense, plain = (self.times[name].median for name in (PACKED, DENSE, PLAIN))
        if not self.gained:
            return (
                f"by zeros: {NOTHING_GAINED}: every layer runs by the library "
                f"({plain / packed:.2f} times as fast as the plain model)"
            )
        return (
            f"packed, the model is {dense / packed:.2f} times as fast as with batch norm folded, "
            f"and {plain / packed:.2f} times as fast as the plain one"
        )

    def __str__(self) -> str:
        rows = [
            (
                row.name,
                "x".join(map(str, row.shape)),
                f"{row.density:.3f}",
                ", ".join(row.follows) or "-",
                row.library or "-",
                row.zeros or "-",
                row.reason or row.runs,
            )
            for row in self.layers
        ]
        header = ("layer", "weight", "density", "with", "library, ms", "zeros, ms", "runs")
        whole = [(name, str(timing)) for name, timing in self.times.items()]
        shapes = ", ".join("x".join(map(str, shape)) for shape in self.shapes)
        outputs = "no output is a tensor that could be compared"
        if self.difference is not None:
            outputs = f"outputs differ by {self.difference:.1e} of their largest value"
        chains = [
            (" + ".join(row.layers), row.apart or "-", row.together or "-", row.runs)
            for row in self.chains
        ]
        lines = (
            table(header, rows),
            *([table(CHAIN_HEADER, chains)] if chains else []),
            table(("whole model", "ms: median (quartiles)"), whole),
            f"{processor()}, {self.threads} thread(s), {self.dtype}, input {shapes}; {outputs}",
            self.verdict,
        )
        return "\n\n".join(lines)


def pack(
    model: nn.Module,
    example_input: Tensor | tuple[Any, ...],
    *,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """A copy of ``model`` for inference on this CPU, whose layers may leave out their zeros.

    Each `nn.Conv2d` and `nn.Linear` is timed on the example input: the library's product against
    the product by zeros, and the faster one stays. Where torch.fx traces the model, batch norm, a
    residual addition and ReLU, ReLU6, SiLU or Hardswish become part of the layer before them; a
    model that it cannot trace is packed part by part. Zeros may be of any pattern. A depthwise
    layer and the 1x1 layers around it may be computed in one go.

    The copy takes any other size: a layer times it at its first call (further sizes than eight do
    as the nearest). Its state_dict has the plain model's keys and values, and loads such a one. It
    can be copied, pickled, exported with torch.export, and called from several threads. It cannot
    be trained: a call in training mode, or one that asks for a gradient, raises UsageError.

    A zero of the weight is not multiplied, so 0 · inf adds nothing; NaN of the weight is kept.

    Args:
        model: plain, folded, or converted (it is folded then); it is left as it is.
        example_input: one batch, (N, ...), or a tuple of the model's arguments.
        dtype: of the products: float32, bfloat16 or float16; None for the model's. The copy takes
            inputs of this dtype.

    Returns:
        The copy, in evaluation mode. ``copy.report`` is a `PackReport`; it says
        "nothing gained here" where neither zeros nor layers in one go made the model faster, and
        then all layers run by the library.

    Raises:
        RuntimeError: the C++ kernels cannot run here, or the packed model's outputs differ from the
            plain one's.
        ValueError: the model has no layer to pack, is not on a CPU, or cannot be called on the
            example; the example is empty; or ``dtype`` is unknown.
    """
    check_module(model)
    if reason := missing():
        raise UsageError(f"fst.pack needs the C++ kernels, which cannot run here: {reason}.")
    one_of("dtype", dtype, (None, *KINDS))
    devices = {p.device.type for p in model.parameters()} - {"cpu"}
    if devices:
        raise ValueError(f"model is on {', '.join(sorted(devices))}: fst.pack is for a CPU.")
    inputs = example = example_input if isinstance(example_input, tuple) else (example_input,)
    if empty := [shape for shape in _shapes(example) if 0 in shape]:
        raise ValueError(f"example_input has shape {empty[0]}: nothing can be timed on no numbers.")
    plain = (fold(model) if sparse_layers(model) else copy.deepcopy(model)).eval()
    packed = copy.deepcopy(plain).requires_grad_(False)
    with torch.no_grad():
        expected = called_on(plain, _copied(inputs))
        packed = _packed(packed, inputs, {})
        layers = _layers(packed)
        chain_depthwise(layers.values())
        if not layers:
            raise ValueError(
                f"{type(model).__name__} has no nn.Conv2d or nn.Linear that can be packed: "
                f"{_refusals(plain) or 'it has none at all'}."
            )
        if dtype is not None:
            _cast(packed, dtype)
            inputs = _copied(inputs, dtype)
        apart = difference(packed(*_copied(inputs)), expected)
        used = dtype or next(iter(layers.values())).dtype
        if apart is not None and not apart <= LARGEST_DIFFERENCE.get(used, 1e-4):
            raise RuntimeError(
                f"the packed model's outputs differ by {apart:.1e} of their largest value."
            )
        times = _times(plain, packed, layers, _copied(example), _copied(inputs))
    rows = _rows(plain, packed)
    rest = (times, apart, _shapes(inputs), used, torch.get_num_threads())
    report = PackReport(rows, _chain_rows(layers), *rest)
    packed.report = report  # type: ignore[assignment]  # no module and no parameter
    return packed


def _shapes(inputs: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(x.shape) for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor))


def _layers(model: nn.Module) -> dict[str, PackedLayer]:
    return {n: layer for n, layer in model.named_modules() if isinstance(layer, PackedLayer)}


def _packed(
    module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], prefix: str = ""
) -> nn.Module:
    """The module with packed layers: traced as a whole, else each of its parts that is called."""
    if not refuses_packing(module):
        return pack_layer(module, prefix.rstrip("."))
    if not any(not refuses_packing(inner) for inner in module.modules()):
        return module
    graph = trace(module)
    if graph is not None and _computes(module, graph, inputs, named):
        fuse(module, graph, prefix)
        return module
    calls: dict[str, LayerCall] = {}
    with each_call(module, (nn.Module,), lambda call: calls.setdefault(call.name, call)):
        module(*_copied(inputs), **named)
    done: list[str] = []
    for name in [name for name, _ in module.named_modules() if name and name in calls]:
        if not any(name.startswith(f"{outer}.") for outer in done):
            call = calls[name]
            owner, _, own = name.rpartition(".")
            part = _packed(call.layer, call.given, call.named, f"{prefix}{name}.")
            module.get_submodule(owner)._modules[own] = part
            done.append(name)
    return module


def _computes(
    module: nn.Module, graph: Any, inputs: tuple[Any, ...], named: dict[str, Any]
) -> bool:
    """True if a trace computes what the module does."""
    traced = torch.fx.GraphModule(module, graph)
    try:
        found = traced(*_copied(inputs), **named)
        apart = difference(found, module(*_copied(inputs), **named))
        return apart is not None and apart <= SAME
    except Exception:  # a wrong trace can fail in any way
        return False


def _copied(inputs: Any, dtype: torch.dtype | None = None) -> Any:
    """The inputs again, as a model may change them; floating ones in ``dtype``."""

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        floats = dtype is not None and value.is_floating_point()
        return value.to(dtype, copy=True) if floats else value.clone()

    return pytree.tree_map(copied, inputs)


def difference(found: Any, expected: Any) -> float | None:
    """The largest of two outputs, relative to the largest value of a tensor.

    Returns:
        None where no output is a tensor; infinity where the outputs do not correspond.
    """
    ours, theirs = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    if len(ours) != len(theirs):
        return float("inf")
    if not any(isinstance(leaf, Tensor) for leaf in theirs):
        return None
    largest = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            continue
        if a.shape != b.shape:
            return float("inf")
        if b.numel():
            a, b = a.double(), b.double()
            same = (a == b) | (a.isnan() & b.isnan())
            apart = torch.where(same, 0.0, (a - b).abs()).max()
            size = b[b.isfinite()].abs().max() if bool(b.isfinite().any()) else torch.tensor(1.0)
            relative = float(apart / (size if size > 0 else 1.0))
            largest = relative if not relative <= largest else largest
    return largest


def _cast(packed: nn.Module, dtype: torch.dtype) -> None:
    """Compute in ``dtype``; packed layers keep their parameters, so that batch norm is exact."""
    kept = {id(layer) for layer in _layers(packed).values()}
    kept |= {id(norm) for layer in _layers(packed).values() for norm in layer.norms}
    for layer in _layers(packed).values():
        layer.dtype, layer.kept, layer.laid = dtype, None, None
        for known in (layer.products, layer.chosen, layer.times):
            known.clear()
        if isinstance(layer.chain, Chain):
            layer.chain.forget()
    for module in packed.modules():
        if id(module) not in kept:
            for value in [*module._parameters.values(), *module._buffers.values()]:
                if value is not None and value.is_floating_point():
                    value.data = value.data.to(dtype)


@contextmanager
def _without_zeros(layers: dict[str, PackedLayer]) -> Iterator[None]:
    for layer in layers.values():
        layer.only_library = True
    try:
        yield
    finally:
        for layer in layers.values():
            layer.only_library = False


def _times(
    plain: nn.Module,
    packed: nn.Module,
    layers: dict[str, PackedLayer],
    given: tuple[Any, ...],
    inputs: tuple[Any, ...],
) -> dict[str, Timing]:
    """Of the whole models; where zeros gain nothing, the packed one is without them from now on."""

    def dense() -> None:
        with _without_zeros(layers):
            packed(*inputs)

    functions: dict[str, Callable[[], object]] = {
        PLAIN: lambda: plain(*given),
        DENSE: dense,
        PACKED: lambda: packed(*inputs),
    }
    times = compare(functions, REPEATS, torch.device("cpu"), warmup=1, most=MOST_MS)
    used = any(lanes != LIBRARY for layer in layers.values() for lanes in layer.chosen.values())
    used |= any(any(chain.chosen.values()) for chain in _chains(layers))
    if not used or times[PACKED].median >= times[DENSE].median:
        times[PACKED] = times[DENSE]
        for layer in layers.values():
            layer.only_library = True
    return times


def _rows(plain: nn.Module, packed: nn.Module) -> tuple[PackedRow, ...]:
    rows, layers = [], _layers(packed)
    for name, module in plain.named_modules():
        if not isinstance(module, nn.Conv2d | nn.Linear):
            continue
        weight = module.weight.detach()
        density = float(weight.count_nonzero() / max(weight.numel(), 1))
        shape, layer = tuple(weight.shape), layers.get(name)
        if layer is None:
            reason = refuses_packing(module) or "not called on its own"
            rows.append(PackedRow(name, shape, density, reason=reason))
            continue
        times = next(iter(layer.times.values()), {})
        zeros = [timing for lanes, timing in times.items() if lanes != LIBRARY]
        lanes = LIBRARY if layer.only_library else next(iter(layer.chosen.values()), LIBRARY)
        follows = ["batch norm"] if layer.norms else []
        follows += ["residual"] if any(key[3] for key in layer.chosen) else []
        follows += [ACTIVATIONS[layer.activation]]
        rows.append(
            PackedRow(
                name,
                shape,
                density,
                tuple(filter(None, follows)),
                WAYS[lanes],
                times.get(LIBRARY),
                min(zeros) if zeros else None,
            )
        )
    return tuple(rows)


def _chains(layers: dict[str, PackedLayer]) -> list[Chain]:
    return [layer.chain for layer in layers.values() if isinstance(layer.chain, Chain)]


def _chain_rows(layers: dict[str, PackedLayer]) -> tuple[ChainRow, ...]:
    rows = []
    for chain in _chains(layers):
        key, times = next(iter(chain.times.items()), (None, {}))
        together = key is not None and chain.chosen[key] and not chain.layers[-1].only_library
        names = tuple(layer.layer_name for layer in chain.layers)
        runs = TOGETHER if together else APART
        rows.append(ChainRow(names, times.get(APART), times.get(TOGETHER), runs))
    return tuple(rows)


def _refusals(model: nn.Module) -> str:
    found = [
        f"{name!r}: {refuses_packing(module)}"
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    ]
    return "; ".join(found[:3])
