"""X and dY of a model's convolutions in one training step, and what rules make of grad_weight."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fst.convert import convert
from fst.layers.modules import Geometry as LayerGeometry
from fst.layers.modules import SparseConv2d, sparse_layers
from fst.ops import positions
from fst.ops.arguments import padded_geometry
from fst.ops.geometry import Geometry, gradients
from fst.rules.rule import Rule

Loss = Callable[[nn.Module, Any], Tensor]
Calls = list[tuple[Tensor, Tensor, Geometry]]  # X, dY


def recorded(model: nn.Module, batch: Any, loss: Loss | None = None) -> dict[str, Gradients]:
    """X and dY of the model's convolutions in one training step, by layer.

    A dense model is converted, to the strategy "dense". Layers that are called without a gradient
    are left out.

    Args:
        batch: what ``loss`` takes.
        loss: (model, batch) -> scalar; None: cross-entropy of model(inputs) and targets.

    Raises:
        ValueError: the model has no convolution whose weight trains.
    """
    layers = _convolutions(model)
    seen: dict[str, Calls] = {}
    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            stack.enter_context(_watched(layer, seen.setdefault(name, [])))
        model.zero_grad()
        (loss or _cross_entropy)(model, batch).backward()
    return {name: Gradients(layers[name], calls) for name, calls in seen.items() if calls}


def _cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def _convolutions(model: nn.Module) -> dict[str, SparseConv2d]:
    """The model's converted convolutions; where nothing is converted, all that can be are."""
    if not sparse_layers(model) and any(isinstance(m, nn.Conv2d) for m in model.modules()):
        convert(model, "dense")
    converted = sparse_layers(model).items()
    layers = {n: m for n, m in converted if isinstance(m, SparseConv2d) and m.weight.requires_grad}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no convolution whose weight trains.")
    return layers


@contextlib.contextmanager
def _watched(layer: SparseConv2d, calls: Calls) -> Iterator[None]:
    """Within, X and dY of each call with a gradient are noted, X as the layer has prepared it."""
    convolve = layer._call

    def noted(input: Tensor, geometry: LayerGeometry) -> Tensor:
        output = convolve(input, geometry)
        if output.requires_grad:
            weight = layer.weight_as_conv()
            image, padded = padded_geometry(input.detach(), weight, *geometry, layer.groups)
            output.register_hook(lambda grad: calls.append((image, grad.detach(), padded)))
        return output

    layer.__dict__["_call"] = noted
    try:
        yield
    finally:
        del layer.__dict__["_call"]


class Gradients:
    """Those of one layer's weight in one batch, exact and estimated.

    Attributes:
        weight: what is convolved with, (Cout, Cin/groups, kh, kw).
        calls: of each call of the layer X (N, Cin, H, W), dY (N, Cout, P, Q) and the geometry.
        multiply_adds: of the exact gradient.
        exact: dW, of all calls together.
    """

    def __init__(self, layer: SparseConv2d, calls: Calls) -> None:
        self.weight = layer.weight_as_conv().detach().to(calls[0][1].dtype)
        self.calls = [(image.to(dy.dtype), dy, geometry) for image, dy, geometry in calls]
        self.multiply_adds = float(
            sum(dy[:, 0].numel() for _, dy, _ in self.calls) * self.weight.numel()
        )
        self.exact = self.of(None, 0)

    def of(self, rule: Rule | None, phase: int) -> Tensor:
        """dW (Cout, Cin/groups, kh, kw) under ``rule`` with the draw ``phase``; None: exactly."""
        return functools.reduce(torch.add, (self._of_call(rule, phase, *c) for c in self.calls))

    def _of_call(
        self, rule: Rule | None, phase: int, image: Tensor, grad_output: Tensor, geometry: Geometry
    ) -> Tensor:
        size = (grad_output.shape[2], grad_output.shape[3])
        if rule is None or rule.leaves_dense(*size):
            needed = (False, True, False)
            exact = gradients(grad_output, image, self.weight, geometry, needed)[1]
            assert exact is not None  # needed
            return exact
        kept, inputs = positions.keep(rule, phase, image, self.weight, size, geometry)
        if kept is None:
            raise ValueError(f"{rule} does not know beforehand which positions it keeps.")
        return positions.grad_weight(grad_output, inputs, self.weight, kept)

    def cost(self, rule: Rule | None) -> float:
        """Multiply-adds that ``rule`` leaves."""
        if rule is None:
            return self.multiply_adds
        left = 0.0
        for _, grad_output, geometry in self.calls:
            size = grad_output.shape[2:]
            kept = rule.kept("grad_weight", self.weight.shape, geometry.groups, *size)
            assert kept is not None  # it depends on a mask for rules of the weight alone
            part, whole = kept
            left += part / whole * grad_output[:, 0].numel()
        return left * self.weight.numel()
