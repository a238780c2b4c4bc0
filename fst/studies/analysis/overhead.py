"""What pruning costs, operand by operand, on a model's real tensors (FST, Tables 2 and 6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fst.ops import positions
from fst.ops.positions import KeptPositions
from fst.ops.prune import prune_grad_output, prune_weight
from fst.rules import masks
from fst.rules.alternating import Alternating
from fst.rules.nm import NM
from fst.rules.strategy import Strategy
from fst.studies.analysis.record import LayerRecord
from fst.studies.benchmark.layers import padded_input

SECONDS_ON_A100 = {  # FST, Tables 2 and 6: ResNet-18, batch 256
    "training step": 0.184,
    "S(W)": 0.0017,
    "S(Wᵀ)": 0.0017,
    "shift(dY)": 0.0008,
    "S(dY)": 0.29,
    "S(Xᵀ), sorted": 0.48,
}


def pruning_functions(
    records: Mapping[str, LayerRecord],
    n: int = 2,
    m: int = 4,
    dtype: torch.dtype | None = None,
) -> dict[str, Callable[[], object]]:
    """Functions that prune one operand of all recorded layers, once each, as a step would.

    Frozen layers have no grad_weight, and first layers no grad_input: they take no part in those.
    ``dtype`` is autocast's in that step; None: it has none, and operands are as its weights.
    """
    rule = Alternating()
    of_weight = Strategy("output", output=NM("weight", n, m))
    of_transpose = Strategy("grad_input", grad_input=NM("weight", n, m))
    of_gradient = NM("grad_output", n, m)

    def cast(layer: nn.Conv2d, operand: Tensor) -> Tensor:
        return operand.to(dtype or layer.weight.dtype)

    layers = [record.layer for record in records.values()]
    calls = [
        (record.layer, call, cast(record.layer, call.grad_output))
        for record in records.values()
        for call in record.calls
    ]
    backward = [(layer, grad) for layer, call, grad in calls if call.grad_input is not None]
    trained = [(layer, grad) for layer, _, grad in calls if layer.weight.requires_grad]
    behind = list({id(layer): layer for layer, _ in backward}.values())
    placed = [
        (*padded_input(layer, cast(layer, call.input)), layer, grad)
        for layer, call, grad in calls
        if layer.weight.requires_grad
    ]

    def weights(some: list[nn.Conv2d], strategy: Strategy) -> None:
        for layer in some:
            prune_weight(layer.weight, strategy, layer.groups, dtype or layer.weight.dtype)

    def gradients(some: list[tuple[nn.Conv2d, Tensor]], gemm: str) -> None:
        for layer, grad_output in some:
            prune_grad_output(grad_output, of_gradient, gemm, layer.groups, None)

    def im2col(prune: bool) -> None:
        for input, geometry, layer, _ in placed:
            columns = F.unfold(
                input, layer.kernel_size, geometry.dilation, geometry.padding, geometry.stride
            )
            if prune:
                masks.apply_mask(columns, masks.nm_mask(columns, n, m, 2))

    def keep() -> list[KeptPositions]:
        return [
            positions.keep(rule, 0, input, layer.weight, grad_output.shape[2:], geometry)[0]
            for input, geometry, layer, grad_output in placed
        ]

    kept = keep()

    def shift() -> None:
        for (*_, grad_output), positions_of_layer in zip(placed, kept, strict=True):
            positions.fold_grad_output(grad_output, positions_of_layer)

    return {
        "S(W)": lambda: weights(layers, of_weight),
        "S(Wᵀ)": lambda: weights(behind, of_transpose),
        "S(dY) for grad_input": lambda: gradients(backward, "grad_input"),
        "S(dY) for grad_weight": lambda: gradients(trained, "grad_weight"),
        "im2col(X)": lambda: im2col(False),
        "im2col(X) and S(Xᵀ), sorted": lambda: im2col(True),
        "S(Xᵀ), fixed mask": keep,
        "shift(dY): pair sums": shift,
    }
