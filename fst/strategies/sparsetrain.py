"""SparseTrain: the zeros that ReLU leaves in X and dY are skipped; no value changes.

Paper: Gong et al., "SparseTrain: Leveraging Dynamic Sparsity in Software for Training DNNs on
General-Purpose SIMD Processors", PACT 2020 (arXiv 1911.10175), a CPU kernel; no official code is
public. Skipping a multiplication by zero leaves every result as it is, so all three GEMMs are
dense here, bit for bit, and what such a kernel could skip is counted: zeros of X (output and
grad_weight) and of dY (grad_input), per layer, in training (`zero_shares`).
"""

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from fst.rules.schedule import PrunedLayer, Schedule
from fst.rules.strategy import Strategy
from fst.strategies.registry import register_strategy

OPERANDS = {"output": "input", "grad_input": "grad_output", "grad_weight": "input"}


class CountZeros(Schedule):
    """Counts the zeros of input and grad_output in training; it changes no value.

    The counts stay on the device, and are part of checkpoints.
    """

    acts_at_steps: ClassVar[bool] = False

    def called(self, layer: PrunedLayer, input: Tensor, output: Tensor) -> None:
        if output.requires_grad:
            counts = layer.state.schedule_state
            _count(counts, "input", input)
            output.register_hook(partial(_count, counts, "grad_output"))

    def measure(self, layer: PrunedLayer) -> dict[str, Tensor]:
        shares = zero_shares(layer)
        layer.state.schedule_state.clear()
        return {f"{operand}_zeros": share for operand, share in shares.items()}

    def remark(self, layer: PrunedLayer, gemm: str) -> str:
        operand = OPERANDS[gemm]
        share = zero_shares(layer).get(operand)
        counted = "are counted in training" if share is None else f"so far: {float(share):.1%}"
        return f"zeros of {operand} {counted}"

    def __str__(self) -> str:
        return "zeros are counted"


def _count(counts: dict[str, Any], operand: str, tensor: Tensor) -> None:
    zeros, elements = f"{operand}_zeros", f"{operand}_elements"
    found = tensor.numel() - torch.count_nonzero(tensor.detach())
    counts[zeros] = found + counts.get(zeros, 0)
    counts[elements] = tensor.numel() + counts.get(elements, 0)


def zero_shares(layer: PrunedLayer) -> dict[str, Tensor]:
    """Share of zeros in "input" and "grad_output" in training, since they were last measured."""
    counts = layer.state.schedule_state
    return {
        operand: counts[f"{operand}_zeros"] / counts[f"{operand}_elements"]
        for operand in ("input", "grad_output")
        if f"{operand}_zeros" in counts
    }


@register_strategy("sparsetrain")
def sparsetrain() -> Strategy:
    """Dense, and the zeros of input and grad_output are counted."""
    return Strategy("sparsetrain", schedule=CountZeros())
