"""S(W) of the layers of a network: how long it holds, and one launch for all of them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fst.ops import sparse24
from fst.ops import triton as ops
from fst.ops.prune import KernelPrunedWeight, PrunedWeight, prune_weights_with_kernel
from fst.ops.sparse24 import PackedWeight

if TYPE_CHECKING:
    from fst.layers.modules import SparseLayer


class KnownWeights:
    """S(W) and S(Wᵀ) of one layer in each dtype, while its weight is the one they were made of.

    A weight is another one once its version or storage differs; what else changes it is for the
    layer to `forget`. Memory of earlier results is written over only once the weight has changed in
    place, which is when autograd forbids the backward pass of earlier calls anyway.

    Attributes:
        by_kernel: whether the kernel made the latest.
        dtype: in which the layer was called last; None before its first call.
    """

    __slots__ = ("_known", "_made_of", "_packed", "_recorded", "_spare", "by_kernel", "dtype")

    def __init__(self) -> None:
        self.by_kernel = False
        self.dtype: torch.dtype | None = None
        self._known: dict[torch.dtype, PrunedWeight] = {}
        self._spare: dict[torch.dtype, PrunedWeight] = {}
        self._made_of: tuple[int | None, int] | None = None
        self._packed: dict[torch.dtype, tuple[object, PackedWeight]] = {}
        self._recorded: list[object] = []

    def of(self, weight: Tensor) -> dict[torch.dtype, PrunedWeight]:
        """What is known of ``weight``, by dtype."""
        if self._known and (weight.is_inference() or self._made_of != _identity(weight)):
            self.forget()
        return self._known

    def forget(self) -> None:
        """The weight may have changed."""
        self._packed = {}
        if self._known:
            self._known, self._spare = {}, self._known

    def spare(self, weight: Tensor, dtype: torch.dtype) -> PrunedWeight | None:
        """An earlier result whose memory may be written over."""
        return None if self._made_of == _identity(weight) else self._spare.pop(dtype, None)

    def add(self, weight: Tensor, dtype: torch.dtype, pruned: PrunedWeight) -> None:
        """Remember what was made of ``weight``."""
        self._known[dtype] = pruned
        self._made_of, self.by_kernel = _identity(weight), isinstance(pruned, KernelPrunedWeight)

    def packed(self, weight: Tensor, dtype: torch.dtype) -> PackedWeight | None:
        """``weight`` as the sparse kernels need it, if it was packed as it is now."""
        made_of, packed = self._packed.get(dtype, (None, None))
        return None if weight.is_inference() or made_of != _identity(weight) else packed

    def add_packed(self, weight: Tensor, dtype: torch.dtype, packed: PackedWeight) -> None:
        """Remember what ``weight`` was packed into."""
        self._packed[dtype] = _identity(weight), packed

    def use(self, dtype: torch.dtype, pruned: PrunedWeight, packed: PackedWeight | None) -> None:
        """The layer is called in ``dtype`` and computes with these."""
        self.dtype = dtype
        on_gpu = pruned.output.is_cuda and torch.cuda.is_initialized()
        if on_gpu and torch.cuda.is_current_stream_capturing():
            self._recorded += [pruned, packed]  # the graph goes on using this memory


def _identity(weight: Tensor) -> tuple[int | None, int]:
    return None if weight.is_inference() else weight._version, weight.data_ptr()


class Network:
    """The layers that one call of `fst.convert` made.

    Where a kernel prunes weights, the first layer that needs S(W) has it made for all of them that
    need it too. A copy of a model is a network of its own.
    """

    def __init__(self) -> None:
        self._layers: weakref.WeakKeyDictionary[SparseLayer, None] = weakref.WeakKeyDictionary()
        self._ahead: weakref.WeakSet[SparseLayer] = weakref.WeakSet()

    def __reduce__(self) -> tuple[type[Network], tuple[()]]:
        return Network, ()  # copies of the layers join it themselves

    def add(self, layer: SparseLayer) -> None:
        """Let ``layer`` be pruned with the others."""
        self._layers[layer] = None

    def remove(self, layer: SparseLayer) -> None:
        """Forget ``layer``."""
        self._layers.pop(layer, None)
        self._ahead.discard(layer)

    def used(self, layer: SparseLayer) -> None:
        """``layer`` uses its S(W)."""
        self._ahead.discard(layer)

    def gradient_arrived(self) -> None:
        """Weights may change from now on: what nobody has used yet might be too old for it."""
        if self._ahead:
            for layer in list(self._ahead):
                layer.forget_pruned()

    def prune(
        self, first: SparseLayer, dtype: torch.dtype, reuse: PrunedWeight | None
    ) -> PrunedWeight:
        """S(W) of ``first``; all that can and need be pruned with it get theirs from one launch.

        Left out are layers that are called in another dtype, and those whose last result from
        here nobody has used. ``reuse``: memory for the result of ``first``.
        """
        others = []
        if _is_stored(first.weight):
            others = [x for x in self._layers if x is not first and self._joins(x, first, dtype)]
        layers = [first, *others]
        spare = (layer.pruned.spare(layer.weight, dtype) for layer in others)
        result, *results = prune_weights_with_kernel(
            [layer.weight_as_conv() for layer in layers],
            [layer.conv_groups for layer in layers],
            first.strategy,
            dtype,
            [reuse, *spare],
        )
        for layer, pruned in zip(others, results, strict=True):
            layer.pruned.add(layer.weight, dtype, pruned)
            self._ahead.add(layer)
            if "prune_weight" in first.decisions:
                layer.decisions["prune_weight"] = first.decisions["prune_weight"]._replace(
                    reason=f"in one launch with layer {first.layer_name!r}", times={}
                )
        return result

    def pack(self, first: SparseLayer, dtype: torch.dtype) -> PackedWeight:
        """``first``'s weight for the sparse kernels; as in `prune`, others' are packed with it."""
        others = []
        if _is_stored(first.weight):
            others = [
                layer
                for layer in self._layers
                if layer is not first
                and self._goes_with(layer, first, dtype)
                and (layer not in self._ahead or dtype in layer.pruned.of(layer.weight))
                and layer.pruned.packed(layer.weight, dtype) is None
            ]
        layers = [first, *others]
        weights = [layer.weight_as_conv().detach() for layer in layers]
        made = sparse24.pack(weights, [layer.conv_groups for layer in layers], dtype)
        for layer, packed in zip(layers, made, strict=True):
            layer.pruned.add_packed(layer.weight, dtype, packed)
        self._ahead.update(others)
        return made[0]

    def _goes_with(self, layer: SparseLayer, first: SparseLayer, dtype: torch.dtype) -> bool:
        return (
            layer.strategy is first.strategy
            and layer.kept_mask is None
            and layer.pruned.dtype in (None, dtype)
            and _is_stored(layer.weight)
            and layer.weight.device == first.weight.device
        )

    def _joins(self, layer: SparseLayer, first: SparseLayer, dtype: torch.dtype) -> bool:
        return (
            layer not in self._ahead
            and self._goes_with(layer, first, dtype)
            and dtype not in layer.pruned.of(layer.weight)
            and ops.takes_weight(layer.weight_as_conv(), dtype)
        )


def _is_stored(weight: Tensor) -> bool:
    """Whether the weight is a parameter whose changes can be told, not computed for one call."""
    return isinstance(weight, nn.Parameter) and weight.is_leaf and not weight.is_inference()
