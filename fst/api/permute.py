"""Permuting the channels of a converted model so that N:M keeps more of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fst.basics.errors import UsageError
from fst.basics.sharding import ORDER, refuse_sharded
from fst.basics.values import check_integer
from fst.channels.axes import Axis
from fst.channels.graph import ModelAxes, traceable, traced
from fst.channels.readers import Reading, find_readings, kept_and_total
from fst.channels.report import LayerMagnitude, PermutationReport
from fst.channels.search import best_order, kept_magnitude
from fst.layers.coverage import inputs_of
from fst.layers.modules import SparseLayer, converted_layers

# Change of the outputs, relative to their norm, that rounding may make; 0.1 in shorter dtypes, and
# on GPUs, which multiply float32 by TF32
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}


def permute(
    model: nn.Module,
    example_input: Tensor | tuple[Any, ...],
    *,
    attempts: int = 20,
    progress: Callable[[str], object] | None = None,
) -> PermutationReport:
    """Permute the channels of a converted, trained model so that N:M keeps larger weights.

    The model computes what it did: with the input channels of a layer go the output channels of the
    layers that make them, and all parameters and buffers between (norms, biases, depthwise
    convolutions, scales). The state_dict keeps its names and shapes, Parameters stay the same
    objects. torch.export traces the model on the example; channels that an unknown operation
    touches stay in place, and so do those of the model's inputs and outputs. Call it after
    `fst.convert` and the loading of trained weights, before `fst.attach`: strategies such as "asp"
    choose their masks there.

    Source: Pool and Yu, "Channel Permutations for N:M Sparsity", NeurIPS 2021;
    `fst.channels.search` says how orders are found.

    Args:
        model: converted, by a strategy that prunes weights N:M by magnitude along input channels.
            In a distributed training, broadcast it from one rank afterwards.
        example_input: one batch (N, ...), or a tuple of inputs: the model is traced and run on it
            in eval mode.
        attempts: to leave a local optimum, for each set of channels: more keep a little more, and
            take longer.
        progress: called with a line of text for each set of channels, such as ``print``.

    Returns:
        The sums of kept magnitudes before and after, for each layer, and which channels stayed in
        place and why. The sum over all layers never falls; that of one layer may, where several
        read the same channels.

    Raises:
        RuntimeError: the model cannot be traced, no channels of it can be permuted (the message
            names what stands in the way), training has begun, or the outputs on the example are
            infinite or NaN, or change by more than rounding does: then everything is put back.
        ValueError: no layer of ``model`` is converted, or ``attempts`` is no integer >= 0.
        TypeError: ``model`` is not a module, or ``example_input`` neither a tensor nor a tuple.
    """
    layers = converted_layers(model)
    refuse_sharded(model, "permute", ORDER)
    check_integer("attempts", attempts, 0)
    inputs = inputs_of(example_input)
    for name, layer in layers.items():
        _check_untrained(name, layer)
    with traceable(model), torch.enable_grad():  # without gradients attention takes a shortcut
        axes = traced(model, inputs)
        earlier = _outputs(model, inputs)
    if not all(bool(output.isfinite().all()) for output in earlier):
        raise UsageError(
            f"permute: outputs of {type(model).__name__} on the example are infinite or NaN: no "
            "change of them could be seen."
        )
    readings, stays = find_readings(layers, axes)
    if not readings:
        reasons = [f"{name!r}: {reason}" for name, reason in stays.items()]
        said = "; ".join(reasons) or "no weight is pruned N:M by magnitude along input channels"
        raise UsageError(f"permute: no channels of {type(model).__name__} can move. {said}.")
    before = {name: kept_and_total(layers[name]) for name in stays}
    orders: dict[Axis, Axis] = {}
    for number, (family, read) in enumerate(readings.items(), start=1):
        size = len(family)
        order, share = _searched(read, size, attempts)
        if order != list(range(size)):
            orders[family] = tuple(family[place] for place in order)
        if progress is not None:
            names = ", ".join(reading.name for reading in read)
            progress(
                f"{number} of {len(readings)}: {size} channels of {names}: {share:.2%} more kept"
            )
    _move(axes, orders.items())
    with traceable(model):
        difference, allowed = _difference(earlier, _outputs(model, inputs))
    if not difference <= allowed:
        _move(axes, [(order, family) for family, order in orders.items()])
        raise UsageError(
            f"permute: outputs of {type(model).__name__} on the example change by {difference:.1g} "
            f"of their norm, more than {allowed:g}: it draws random numbers, or its graph "
            "depends on values. Its channels are back in their places."
        )
    return PermutationReport(
        [
            LayerMagnitude(name, total, kept, kept_and_total(layers[name])[0], stays[name])
            for name, (kept, total) in before.items()
        ],
        len(orders),
        difference,
    )


def _check_untrained(name: str, layer: SparseLayer) -> None:
    state = layer.state
    if state.step or state.schedule_state or state.kept_mask is not None:
        raise UsageError(
            f"permute: layer {name!r} has begun to train, so its mask and the optimizer's momentum "
            "belong to the order of its channels: permute after fst.convert, before the first step."
        )
    if layer.passing.frozen is not None:
        raise UsageError("permute: the model is within fst.frozen, which remembers its weights.")


def _searched(read: Sequence[Reading], size: int, attempts: int) -> tuple[list[int], float]:
    """An order of ``size`` channels, and how much more it keeps; a last group that is not full
    stays.
    """
    m = read[0].m
    whole = size // m * m
    readers = [reading.magnitudes(whole) for reading in read]
    order = best_order(readers, m, attempts)
    native = kept_magnitude(readers, torch.arange(whole, device="cpu"), m)
    gain = kept_magnitude(readers, order, m) / native - 1 if native else 0.0
    return [*order.tolist(), *range(whole, size)], gain


@torch.no_grad()
def _move(axes: ModelAxes, orders: Iterable[tuple[Axis, Axis]]) -> None:
    """Put other channels in the places of some, (before, after), in all parameters and buffers."""
    moved = {old: new for pair in orders for old, new in zip(*pair, strict=True)}
    for tensor, own in axes:
        for dim, axis in enumerate(own):
            if not moved.keys().isdisjoint(axis):
                index = torch.tensor(_places(axis, moved), device=tensor.device)
                tensor.copy_(tensor.index_select(dim, index))


def _places(axis: Axis, moved: Mapping[int, int]) -> list[int]:
    """Which elements of an axis are to stand at its places."""
    places: dict[int, list[int]] = {}
    for place, channel in enumerate(axis):
        places.setdefault(channel, []).append(place)
    left = {channel: iter(places[moved.get(channel, channel)]) for channel in places}
    return [next(left[channel]) for channel in axis]


@torch.no_grad()
def _outputs(model: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    """Copies of the tensors that a call returns."""
    return [t.clone() for t in tree_leaves(model(*inputs)) if isinstance(t, Tensor)]


def _difference(earlier: Sequence[Tensor], later: Sequence[Tensor]) -> tuple[float, float]:
    """Largest change of a tensor, relative to its norm, and how large it may be."""
    found, allowed = 0.0, 0.0
    for one, other in zip(earlier, later, strict=True):
        norm = torch.linalg.vector_norm(one.double())
        change = torch.linalg.vector_norm((other - one).double())
        relative = (change / norm).item() if norm else change.item()
        found = relative if not relative <= found else found  # NaN is a change too
        is_exact = one.dtype == torch.float64 or not one.is_cuda
        allowed = max(allowed, TOLERANCES.get(one.dtype, 0.1) if is_exact else 0.1)
    return found, allowed
