"""`pack`: a model for inference on a CPU, whose layers skip the zeros of their weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fst.api.difference import difference
from fst.api.fold import fold
from fst.backends.timing import Timing, compare
from fst.basics.errors import UsageError
from fst.basics.values import check_module, one_of
from fst.inference.checks import refuses_packing
from fst.inference.fused import fuse
from fst.inference.packed import pack_layer, packed_layers
from fst.inference.report import (
    BFLOAT16,
    FOLDED,
    PACKED,
    PLAIN,
    PackReport,
    chain_rows,
    layer_rows,
    plans_of,
)
from fst.inference.traced import State, Trace, python_state, restore, run_graph, trace
from fst.layers.calls import LayerCall, called_on, each_call
from fst.layers.coverage import inputs_of
from fst.layers.modules import sparse_layers
from fst.ops.backends.packed import LIBRARY
from fst.ops.cpp import KINDS, missing

REPEATS, MOST_MS = 7, 4_000.0  # of the whole model's timing
LARGEST_DIFFERENCE = {  # of an output, relative to its largest value
    torch.float32: 1e-4,
    torch.bfloat16: 0.1,
    torch.float16: 0.02,
}
SAME = 1e-5  # of a trace's output, which computes what the model does
QUICK = 100.0  # milliseconds of a call, up to which bfloat16 is tried too


def pack(
    model: nn.Module,
    example_input: Tensor | tuple[Any, ...],
    *,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """A copy of ``model`` for inference on this CPU, whose layers may skip their zeros.

    Each `nn.Conv2d` and `nn.Linear` is computed by one of several backends, which are timed on the
    example input and chosen as in training (`fst.backends`): another one than the library must gain
    5 %. Times are kept on disk; FST_AUTOTUNE=0, `force` and FST_BACKENDS (packed=NAME) decide here
    too. Where torch.fx traces a model, batch norm, a residual addition and ReLU, ReLU6, SiLU or
    Hardswish become part of the layer before them; a model that it cannot trace is packed part by
    part. Zeros may be of any pattern. One kernel may compute a depthwise layer together with the
    1x1 layers around it.

    The copy takes any other size: a layer times it at its first call (after eight sizes the most
    frequent choice holds). Its state_dict has the plain model's keys and values, and loads such a
    one. It can be copied, pickled, exported with torch.export, and called from several threads. It
    cannot be trained: a call in training mode, or one that requires a gradient, raises UsageError.

    Changed weights, batch norms, strides, modules, hooks, and plain values that the model's code
    reads are noticed in the next call. What PyTorch does not count is not: ``weight.data.mul_(2)``,
    writes through NumPy; and a compiled or exported program keeps the weights of its making.

    A zero of the weight is not multiplied, so 0 · inf adds nothing; NaN of the weight is kept.

    Args:
        model: plain, folded, or converted (it is folded then); it is left as it is.
        example_input: one batch, (N, ...), or a tuple of the model's arguments.
        dtype: of the products: float32, bfloat16 or float16; None for the model's. The copy takes
            inputs of this dtype.

    Returns:
        The copy, in evaluation mode. ``copy.report`` is a `PackReport`; it says
        "nothing gained here" where no kernel of this package made the model faster, and then all
        layers run by the library.

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
    inputs = inputs_of(example_input)
    if empty := [shape for shape in _shapes(inputs) if 0 in shape]:
        raise ValueError(f"example_input has shape {empty[0]}: nothing can be timed on no numbers.")
    with torch.inference_mode(False), torch.no_grad():
        inputs = _copied(inputs)  # plain tensors, also where the caller is in inference mode
        plain = (fold(model) if sparse_layers(model) else copy.deepcopy(model)).eval()
        state = python_state(plain)
        called_on(plain, _copied(inputs))
        layers = [of for of in plain.named_modules() if isinstance(of[1], nn.Conv2d | nn.Linear)]
        refused = [f"{name!r}: {why}" for name, of in layers if (why := refuses_packing(of))]
        if len(refused) == len(layers):
            raise ValueError(
                f"{type(model).__name__} has no nn.Conv2d or nn.Linear that can be packed: "
                f"{'; '.join(refused[:3]) or 'it has none at all'}."
            )
        packed, given, apart = _packed_like(plain, state, inputs, dtype)
        packed, times = _timed(plain, packed, inputs, given)
        used = _dtype_of(packed)
        bfloat16 = ""
        if used == torch.float32 and torch.cpu._is_avx512_bf16_supported():
            bfloat16 = _in_bfloat16(plain, packed, inputs, state, times)
    restore(packed, state)
    packed.report = PackReport(  # type: ignore[assignment]  # no module and no parameter
        layers=layer_rows(plain, packed),
        chains=chain_rows(packed),
        times=times,
        difference=apart,
        shapes=_shapes(given),
        dtype=used,
        threads=torch.get_num_threads(),
        bfloat16=bfloat16,
    )
    return packed


def _packed_like(
    plain: nn.Module, state: State, inputs: tuple[Any, ...], dtype: torch.dtype | None
) -> tuple[nn.Module, tuple[Any, ...], float | None]:
    """A packed copy, the inputs in its dtype, and how far its outputs are from the plain ones.

    Where the graph of the model computes something else, layers are packed without one.

    Raises:
        RuntimeError: the outputs are too far from the plain model's.
    """
    given = inputs if dtype is None else _copied(inputs, dtype)
    for traced in (True, False):
        packed = copy.deepcopy(plain).requires_grad_(False)
        if traced:
            packed = _packed(packed, inputs, {})
        else:
            for name, module in packed.named_modules():
                if not refuses_packing(module):
                    pack_layer(module, name)
        if dtype is not None:
            _cast(packed, dtype)
        apart = _apart(plain, packed, inputs, given, state)
        if apart is None or apart <= LARGEST_DIFFERENCE.get(_dtype_of(packed), 1e-4):
            return packed, given, apart
    raise RuntimeError(f"the packed model's outputs differ by {apart:.1e} of their largest value.")


def _apart(
    plain: nn.Module,
    packed: nn.Module,
    inputs: tuple[Any, ...],
    given: tuple[Any, ...],
    state: State,
) -> float | None:
    """`difference` of the outputs."""
    for model in (plain, packed):
        restore(model, state)
    return difference(packed(*_copied(given)), plain(*_copied(inputs)))


def _dtype_of(packed: nn.Module) -> torch.dtype:
    return next((layer.dtype for layer in packed_layers(packed).values()), torch.float32)


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
    found = trace(module)
    if found is not None and _computes(module, found, inputs, named):
        fuse(module, found.graph, prefix)
        run_graph(module, found, inputs, named)
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
    module: nn.Module, found: Trace, inputs: tuple[Any, ...], named: dict[str, Any]
) -> bool:
    """True if a trace computes what the module does."""
    traced = torch.fx.GraphModule(module, found.graph)
    try:
        output = traced.forward(*_copied(inputs), **named)
        apart = difference(output, module(*_copied(inputs), **named))
        return apart is not None and apart <= SAME
    except Exception:  # a wrong trace can fail in any way
        return False


def _copied(inputs: Any, dtype: torch.dtype | None = None) -> Any:
    """The inputs again, as a model may change them; floating ones in ``dtype``."""

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(dtype, copy=True) if value.is_floating_point() else value.clone()

    return pytree.tree_map(copied, inputs)


def _cast(packed: nn.Module, dtype: torch.dtype) -> None:
    """Compute in ``dtype``; layers keep their parameters where batch norm is folded into them."""
    layers = packed_layers(packed).values()
    kept = {id(module) for layer in layers if layer.norm for module in (layer, layer.norm)}
    for plans in plans_of(packed):
        plans.only()
    for module in packed.modules():
        if id(module) not in kept:
            for value in [*module._parameters.values(), *module._buffers.values()]:
                if value is not None and value.is_floating_point():
                    value.data = value.data.to(dtype)
    for layer in layers:
        layer.cast = None if layer.weight.dtype == dtype else dtype


def _timed(
    plain: nn.Module, packed: nn.Module, inputs: tuple[Any, ...], given: tuple[Any, ...]
) -> tuple[nn.Module, dict[str, Timing]]:
    """The packed model, all by the library where it is no faster; times of the whole models."""
    dense = copy.deepcopy(packed, {id(p): p for p in packed.parameters()})
    for plans in plans_of(dense):
        plans.only(*LIBRARY)
    functions: dict[str, Callable[[], object]] = {
        PLAIN: lambda: plain(*inputs),
        FOLDED: lambda: dense(*given),
        PACKED: lambda: packed(*given),
    }
    times = compare(functions, REPEATS, torch.device("cpu"), warmup=1, most=MOST_MS)
    used = any(plans.decision.backend not in LIBRARY for plans in plans_of(packed))
    if used and times[PACKED].median < times[FOLDED].median:
        return packed, times
    for plans, tried in zip(plans_of(dense), plans_of(packed), strict=True):
        decision = plans.decision._replace(times=tried.decision.times)
        plans.record.decisions[decision.operation] = decision
    return dense, times | {PACKED: times[FOLDED]}


def _in_bfloat16(
    plain: nn.Module,
    packed: nn.Module,
    inputs: tuple[Any, ...],
    state: State,
    times: dict[str, Timing],
) -> str:
    """Time bfloat16 where a call takes at most `QUICK` ms; return a sentence about it."""
    advice = "fst.pack(..., dtype=torch.bfloat16)"
    if times[PACKED].median > QUICK:
        return f"bfloat16 was not tried, as a call takes more than {QUICK:.0f} ms: {advice}."
    other, given = copy.deepcopy(packed), _copied(inputs, torch.bfloat16)
    try:
        _cast(other, torch.bfloat16)
        apart = _apart(plain, other, inputs, given, state)
    except Exception as error:  # a model is code that can fail in any way in another dtype
        return f"bfloat16: {type(error).__name__}: {error}"
    functions: dict[str, Callable[[], object]] = {
        PACKED: lambda: packed(*inputs),
        BFLOAT16: lambda: other(*given),
    }
    found = compare(functions, REPEATS, torch.device("cpu"), warmup=1, most=MOST_MS)
    times[BFLOAT16] = found[BFLOAT16]
    gain = found[PACKED].median / found[BFLOAT16].median
    outputs = "" if apart is None else f", and outputs differ by {apart:.1e} of their largest value"
    return f"In bfloat16 it is {gain:.2f} times as fast{outputs}: {advice}."
