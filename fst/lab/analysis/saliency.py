"""The error that pruning makes in gradients: of one layer alone, and accumulated by all.

FST (Eq. 4, Table 1) finds pruned grad_outputs to ruin training and supposes that their error adds
up from layer to layer; SDGP finds them harmless. Here both errors are measured on a live model:

- local: the layer is given the exact input and grad_output, so that the error is its own;
- global: all layers prune, so that grad_output carries the errors of the layers behind it.

Over several batches, what of the local error of grad_weight does not average out: see `bias`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fst.lab.analysis.approximations import Approximation
from fst.lab.analysis.bias import Bias, MeanGradient, biases
from fst.lab.analysis.errors import Error, error_of, mean
from fst.lab.analysis.record import (
    Batch,
    LayerRecord,
    Loss,
    StepRecord,
    record_step,
    same_draws,
)

KINDS = (
    "local grad_weight",
    "local grad_input",
    "global grad_weight",
    "global grad_input",
)


@dataclass
class LayerSaliency:
    """A layer's `Error`s by kind (see `KINDS`), means over batches; kinds without one are absent
    (no grad_input in the first layer, no grad_weight where the weight needs none).

    Attributes:
        depth: convolutions before it, in the order of execution.
        bias: of the local grad_weight, for each part of the kernel (see `bias.PARTS`).
    """

    name: str
    depth: int
    errors: dict[str, Error]
    bias: dict[str, Bias]


@dataclass
class Saliency:
    """What `saliency` finds about one approximation.

    Attributes:
        layers: the convolutions that a gradient reaches, in the order of execution.
        total: error of the gradient of all parameters taken as one vector.
        bias: of the local grad_weight of all layers taken as one vector.
    """

    label: str
    layers: list[LayerSaliency]
    total: Error
    bias: dict[str, Bias]


@dataclass(frozen=True)
class Precision:
    """How the approximation's step is computed; the exact one is in the model's own dtype.

    Attributes:
        dtype: autocast's, or None for no autocast.
        scale: the loss is multiplied by it for the backward pass.
    """

    dtype: torch.dtype | None = None
    scale: float = 1.0

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """The context to run in."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(device.type, self.dtype)

    def loss_of(self, loss: Loss, model: nn.Module, batch: Batch) -> Callable[[], Tensor]:
        """The loss of a model and a batch, computed like this when it is called."""
        device = next(model.parameters()).device

        def computed() -> Tensor:
            with self.autocast(device):
                return loss(model, batch)

        return computed


@dataclass
class _Sums:
    layers: dict[str, dict[str, list[Error]]] = field(default_factory=dict)
    totals: list[Error] = field(default_factory=list)
    means: dict[str, MeanGradient] = field(default_factory=dict)


def saliency(
    model: nn.Module,
    loss: Loss,
    batches: Sequence[Batch],
    approximation: Approximation,
    *,
    root: Callable[[nn.Module], nn.Module] = lambda model: model,
    reference: str = "forward",
    selectors: Mapping[str, Any] | None = None,
    precision: Precision | None = None,
    seed: int = 0,
) -> Saliency:
    """Compare the gradients of ``approximation`` with the exact ones, on every batch.

    Args:
        model: dense, in the mode that is to be analysed; it is copied.
        loss: computes the scalar of a model and a batch.
        root: the part of a model that is converted, and by whose names layers go.
        reference: see `Approximation.prepare_reference`.
        selectors: include, exclude and other choices of `fst.convert`.
        seed: of everything that a step draws (dropout, random rules), the same for both.
    """
    chosen, precision = dict(selectors or {}), precision or Precision()
    exact, approximate, alone = (copy.deepcopy(model) for _ in range(3))
    approximation.prepare_reference(root(exact), chosen, reference, seed)
    for prepared in (approximate, alone):
        approximation.prepare(root(prepared), chosen, seed)
    sums = _Sums()
    for number, batch in enumerate(batches):
        place = (batch, loss, seed + number)
        truth = _step(exact, root, *place, Precision())
        found = _step(approximate, root, *place, precision)
        for name, record in truth.layers.items():
            errors = sums.layers.setdefault(name, {kind: [] for kind in KINDS})
            layer = root(alone).get_submodule(name)
            with same_draws(seed + number, record.calls[0].input.device):
                own = _local_gradients(layer, record, precision)
            _add(errors, "local", own, record)
            if own[0] is not None and record.grad_weight is not None:
                sums.means.setdefault(name, MeanGradient()).add(own[0], record.grad_weight)
            if name in found.layers:
                other = found.layers[name]
                _add(errors, "global", (other.grad_weight, _grad_inputs(other)), record)
        shared = [name for name in truth.gradients if name in found.gradients]
        sums.totals.append(
            error_of(*([step.gradients[name] for name in shared] for step in (found, truth)))
        )
    layers = [
        LayerSaliency(
            name,
            depth,
            {kind: mean(e) for kind, e in errors.items() if e},
            biases([sums.means[name]] if name in sums.means else []),
        )
        for depth, (name, errors) in enumerate(sums.layers.items())
    ]
    return Saliency(approximation.label, layers, mean(sums.totals), biases(sums.means.values()))


def _step(
    model: nn.Module,
    root: Callable[[nn.Module], nn.Module],
    batch: Batch,
    loss: Loss,
    seed: int,
    precision: Precision,
) -> StepRecord:
    run = precision.loss_of(loss, model, batch)
    with same_draws(seed, next(model.parameters()).device):
        return record_step(root(model), run, scale=precision.scale)


def _local_gradients(
    layer: nn.Module, record: LayerRecord, precision: Precision
) -> tuple[Tensor | None, list[Tensor]]:
    """grad_weight and the grad_inputs of ``layer`` for the recorded inputs and grad_outputs."""
    total: Tensor | None = None
    grad_inputs = []
    for call in record.calls:
        input = call.input.clone().requires_grad_(call.grad_input is not None)
        with precision.autocast(input.device):
            output = layer(input)
        wanted = [x for x in (input, layer.weight) if x.requires_grad]
        scaled = (call.grad_output * precision.scale).to(output.dtype)
        gradients = list(torch.autograd.grad(output, wanted, scaled))
        if input.requires_grad:
            grad_inputs.append(gradients.pop(0) / precision.scale)
        for gradient in gradients:
            part = gradient / precision.scale
            total = part if total is None else total + part
    return total, grad_inputs


def _grad_inputs(record: LayerRecord) -> list[Tensor]:
    return [call.grad_input for call in record.calls if call.grad_input is not None]


def _add(
    errors: dict[str, list[Error]],
    scope: str,
    found: tuple[Tensor | None, list[Tensor]],
    record: LayerRecord,
) -> None:
    grad_weight, grad_inputs = found
    if grad_weight is not None and record.grad_weight is not None:
        errors[f"{scope} grad_weight"].append(error_of([grad_weight], [record.grad_weight]))
    exact = _grad_inputs(record)
    if exact and len(exact) == len(grad_inputs):
        errors[f"{scope} grad_input"].append(error_of(grad_inputs, exact))
