"""An experiment that no strategy allows: grad_output pruned along any axis, in either GEMM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fst.ops.prune import prune_grad_output
from fst.rules.nm import NM

PROBE = "dy"  # its name among strategies
AXES = {"channel": "grad_input", "position": "grad_weight"}  # the GEMM whose groups run there
PROBED = {
    "grad_input": (True, False),
    "grad_weight": (False, True),
    "both": (True, True),
}


@dataclass(frozen=True)
class GradientProbe:
    """A pruning along any axis, whatever the GEMM's reduction axis is.

    Attributes:
        rule: what is kept of grad_output.
        axis: "channel" (output channels) or "position" (the flattened P·Q).
        gemm: "grad_input", "grad_weight" or "both": which GEMM sees the pruned grad_output.
    """

    rule: NM
    axis: str = "channel"
    gemm: str = "grad_input"

    def __post_init__(self) -> None:
        for name, value, allowed in (("axis", self.axis, AXES), ("gemm", self.gemm, PROBED)):
            if value not in allowed:
                raise ValueError(f"{PROBE}: {name}={value!r} must be one of {', '.join(allowed)}.")

    def prune(self, grad_output: Tensor, groups: int) -> Tensor:
        """grad_output (N, Cout, P, Q), pruned."""
        return prune_grad_output(grad_output, self.rule, AXES[self.axis], groups, None)


class _Route(torch.autograd.Function):
    """Identity whose backward passes the gradient through a function."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Callable[[Tensor], Tensor] | None) -> Tensor:
        ctx.change = change
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient if ctx.change is None else ctx.change(gradient), None


class _ProbedConv2d(nn.Conv2d):
    """A dense convolution of which grad_input and grad_weight see different grad_outputs."""

    probe: GradientProbe

    def forward(self, input: Tensor) -> Tensor:
        def change(gradient: Tensor) -> Tensor:
            return self.probe.prune(gradient, self.groups)

        in_input, in_weight = PROBED[self.probe.gemm]
        fixed = (
            parameter if parameter is None else parameter.detach()
            for parameter in (self.weight, self.bias)
        )
        to_input = self._conv_forward(input, *fixed)
        to_weight = self._conv_forward(input.detach(), self.weight, self.bias)
        first = _Route.apply(to_input, change if in_input else None)
        second = _Route.apply(to_weight, change if in_weight else None)
        return first + (second - second.detach())


def insert_probe(model: nn.Module, probe: GradientProbe) -> None:
    """Make the plain convolutions of ``model`` prune as ``probe`` says.

    Raises:
        ValueError: it has none.
    """
    convolutions = [m for m in model.modules() if type(m) is nn.Conv2d]
    if not convolutions:
        raise ValueError(f"{PROBE}: {type(model).__name__} has no plain nn.Conv2d.")
    for layer in convolutions:
        layer.__class__ = _ProbedConv2d
        layer.probe = probe
