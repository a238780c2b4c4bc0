"""`pack`: a model for inference on a CPU, whose layers leave out the zeros of their weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fst.api.fold import fold
from fst.backends.timing import Timing, compare
from fst.basics.errors import UsageError
from fst.basics.values import check_module, one_of
from fst.inference.chained import Chain, chain_depthwise
from fst.inference.fused import fuse
from fst.inference.packed import (
    LIBRARY,
    PackedLayer,
    pack_layer,
)
from fst.inference.report import (
    DENSE,
    PACKED,
    PLAIN,
    PackReport,
    chain_rows,
    chains_of,
    layer_rows,
    packed_layers,
)
from fst.inference.traced import trace
from fst.layers.calls import LayerCall, called_on, each_call
from fst.layers.checks import refuses_packing
from fst.layers.modules import sparse_layers
from fst.ops.cpp.library import KINDS, missing

REPEATS, MOST_MS = 7, 4_000.0  # of the whole model's timing
LARGEST_DIFFERENCE = {  # of an output, relative to its largest value
    torch.float32: 1e-4,
    torch.bfloat16: 0.1,
    torch.float16: 0.02,
}
SAME = 1e-5  # of a trace's output, which computes what the model does


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
        layers = packed_layers(packed)
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
    rows = layer_rows(plain, packed)
    rest = (times, apart, _shapes(inputs), used, torch.get_num_threads())
    report = PackReport(rows, chain_rows(layers.values()), *rest)
    packed.report = report  # type: ignore[assignment]  # no module and no parameter
    return packed


def _shapes(inputs: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(x.shape) for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor))


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
        fuse(module, graph, inputs, named, prefix)
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
        found = traced.forward(*_copied(inputs), **named)
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
    """Compute in ``dtype``; layers keep their parameters where batch norm is folded into them."""
    normed = [layer for layer in packed_layers(packed).values() if layer.norms]
    kept = {id(module) for layer in normed for module in (layer, *layer.norms)}
    for layer in packed_layers(packed).values():
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
    used |= any(any(chain.chosen.values()) for chain in chains_of(layers.values()))
    if not used or times[PACKED].median >= times[DENSE].median:
        times[PACKED] = times[DENSE]
        for layer in layers.values():
            layer.only_library = True
    return times


def _refusals(model: nn.Module) -> str:
    found = [
        f"{name!r}: {refuses_packing(module)}"
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    ]
    return "; ".join(found[:3])
