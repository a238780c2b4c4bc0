"""The error that pruning makes in gradients: of one layer alone, and accumulated by all (Eq. 4).

python benchmarks/papers/saliency.py CONFIG --checkpoint FILE --strategies fst sdgp

FST (Eq. 4, Table 1) finds pruned grad_outputs to ruin training and supposes that their error adds
up from layer to layer; SDGP finds them harmless. Here both errors are measured on a live model:

- local: the layer is given the exact input and grad_output, so that the error is its own;
- global: all layers prune, so that grad_output carries the errors of the layers behind it.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from errors import Error, error_of, mean
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator
from model_under_test import Batch, Loss, add_model_options, one_step, same_draws, tested_model
from paper import Precision, add_precision, drawing, main, name_layers
from record import LayerRecord, StepRecord, record_step
from torch import Tensor, nn

import fst
from fst.basics.values import one_of
from fst.lab.document import Document
from fst.lab.figures import COLOURS, INK
from fst.lab.model import amp_dtype
from fst.rules.nm import NM
from fst.rules.strategy import Strategy
from fst.training.engine.model import sparse_root

KINDS = (
    "local grad_weight",
    "local grad_input",
    "global grad_weight",
    "global grad_input",
)

FIGURES = (
    ("relative", "relative error", True),
    ("cosine", "cosine", False),
    ("norm", "norm over the exact one", True),
)
BY_DEPTH = (
    "Layers from the first to the last. Dashed: that layer prunes alone; solid: all layers do, so "
    "that errors come in from the right."
)
COMPARED = ["wg", "wx", "gg", "gx", "sdgp,rule=magnitude", "sdgp"]
REFERENCES = {  # what the exact gradients are those of
    "forward": "the dense backward pass of the same forward pass",
    "dense": "the dense model",
}
SCOPES = {"local": "--", "global": "-"}


@dataclass
class LayerSaliency:
    """A layer's `Error`s by kind (see `KINDS`), means over batches; kinds without one are absent
    (no grad_input in the first layer, no grad_weight where the weight needs none).

    Attributes:
        depth: convolutions before it, in the order of execution.
    """

    name: str
    depth: int
    errors: dict[str, Error]


@dataclass
class Saliency:
    """The errors of one strategy, as `saliency` finds them.

    Attributes:
        layers: the convolutions that a gradient reaches, in the order of execution.
        total: error of the gradient of all parameters taken as one vector.
    """

    label: str
    layers: list[LayerSaliency]
    total: Error


@dataclass
class _Sums:
    layers: dict[str, dict[str, list[Error]]] = field(default_factory=dict)
    totals: list[Error] = field(default_factory=list)


def saliency(
    model: nn.Module,
    loss: Loss,
    batches: Sequence[Batch],
    label: str,
    *,
    root: Callable[[nn.Module], nn.Module] = lambda model: model,
    reference: str = "forward",
    selectors: Mapping[str, Any] | None = None,
    precision: Precision | None = None,
    seed: int = 0,
) -> Saliency:
    """Compare the gradients of a strategy with the exact ones, on every batch.

    Args:
        model: dense, in the mode that is to be analysed; it is copied.
        loss: computes the scalar of a model and a batch.
        label: of the strategy, NAME or NAME,OPTION=VALUE,...
        root: the part of a model that is converted, and by whose names layers go.
        reference: "forward": exact is the dense backward pass of the strategy's own forward pass;
            "dense": that of the dense model.
        selectors: include, exclude and other choices of `fst.convert`.
        seed: of everything that a step draws (dropout, random rules), the same for both.
    """
    one_of("reference", reference, tuple(REFERENCES))
    strategy = one_step(fst.get_strategy(label))
    chosen, precision = dict(selectors or {}), precision or Precision()
    exact, approximate, alone = (copy.deepcopy(model) for _ in range(3))
    for prepared in (approximate, alone):
        fst.convert(root(prepared), strategy, **chosen)
        fst.seed_random_rules(root(prepared), seed)
        _keep_masks(root(prepared), root(prepared))
    if strategy.output is not None and reference == "forward":
        least = strategy.min_in_channels
        forward = Strategy("forward", output=NM("weight"), min_in_channels=least)
        fst.convert(root(exact), forward, **chosen)
        _keep_masks(root(exact), root(alone))
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
            if name in found.layers:
                other = found.layers[name]
                _add(errors, "global", (other.grad_weight, _grad_inputs(other)), record)
        shared = [name for name in truth.gradients if name in found.gradients]
        sums.totals.append(
            error_of(*([step.gradients[name] for name in shared] for step in (found, truth)))
        )
    layers = [
        LayerSaliency(name, depth, {kind: mean(e) for kind, e in errors.items() if e})
        for depth, (name, errors) in enumerate(sums.layers.items())
    ]
    return Saliency(label, layers, mean(sums.totals))


def _keep_masks(model: nn.Module, pruned: nn.Module) -> None:
    """Prune the weights of ``model`` by the masks that ``pruned`` has now, in every step."""
    layers = fst.sparse_layers(model)
    for name, source in fst.sparse_layers(pruned).items():
        mask = source.output_mask()
        if mask is not None:
            layers[name].set_mask(mask.view(source.weight_as_conv().shape))


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add_model_options(parser, batches=4, batch_size=32)
    parser.add_argument(
        "--strategies",
        nargs="+",
        default=COMPARED,
        metavar="STRATEGY",
        help="NAME or NAME,OPTION=VALUE,...",
    )
    parser.add_argument(
        "--reference",
        choices=REFERENCES,
        default="forward",
        help="what is exact: the dense backward pass of the strategy's own forward pass, so that "
        "only backward pruning counts, or a dense model (default: forward)",
    )
    add_precision(parser, "the pruned steps; the exact ones are in float32")


def run(options: argparse.Namespace) -> Document:
    """Measure every strategy on the same batches."""
    tested = tested_model(options)
    precision = Precision(amp_dtype(options.dtype), options.loss_scale)
    found = [
        saliency(
            tested.model,
            tested.loss,
            tested.batches,
            label,
            root=sparse_root,
            reference=options.reference,
            selectors=tested.selectors,
            precision=precision,
            seed=options.seed,
        )
        for label in options.strategies
    ]
    result = Document(
        "Errors of pruned gradients, layer by layer",
        f"{tested.title}; means over {options.batches} batches of {options.batch_size} images in "
        f"training mode, in {options.dtype} with the loss scaled by {options.loss_scale:g}. Exact: "
        f"{REFERENCES[options.reference]} in float32, without weight decay of any kind. Local: one "
        "layer prunes, given the exact input and grad_output. Global: all layers prune in the same "
        "step.",
    )
    measures = ("relative error", "cosine", "norm ratio")
    result.add_table(
        "Gradient of all parameters as one vector",
        ["strategy", *measures],
        [[one.label, *one.total] for one in found],
    )
    rows = [
        [one.label, layer.name, *(value for kind in KINDS for value in _cells(layer.errors, kind))]
        for one in found
        for layer in one.layers
    ]
    parts = [f"{kind}: {measure}" for kind in KINDS for measure in measures]
    result.add_table("Per layer", ["strategy", "layer", *parts], rows)
    for name, label, log in FIGURES:
        drawn = _draw(found, name, label, log=log)
        result.add_figure(f"Gradients: {label}", f"saliency_{name}", BY_DEPTH, drawn, options.out)
    return result


def _cells(errors: dict[str, Error], kind: str) -> list[float | None]:
    return list(errors.get(kind) or [None] * 3)


def _draw(found: Sequence[Saliency], field: str, label: str, *, log: bool) -> Figure:
    """A field of `Error` by depth: dashed local, solid global; a panel for each gradient.

    On a logarithmic axis errors of 0 are left out.
    """
    names = [layer.name for layer in found[0].layers]
    figure = drawing(max(11.0, 0.36 * len(names) + 4), 4.6)
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, gradient in zip(axes, ("grad_weight", "grad_input"), strict=True):
        for index, one in enumerate(found):
            for scope, line in SCOPES.items():
                points = [
                    (layer.depth, getattr(layer.errors[kind], field))
                    for kind in [f"{scope} {gradient}"]
                    for layer in one.layers
                    if kind in layer.errors
                ]
                points = [point for point in points if point[1] > 0 or not log]
                if points:
                    x, y = zip(*points, strict=True)
                    axis.plot(x, y, line, marker="o", markersize=3, color=_colour(index))
        axis.set_title(gradient, loc="left")
        name_layers(axis, names)
        if log:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(_plain_number)
            axis.yaxis.set_minor_formatter(_plain_number)
            axis.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes[0].set_ylabel(label)
    keys = [Line2D([], [], color=_colour(i), label=one.label) for i, one in enumerate(found)]
    keys += [Line2D([], [], color=INK, linestyle=ls, label=s) for s, ls in SCOPES.items()]
    figure.legend(handles=keys, loc="outside right upper", fontsize=8)
    return figure


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _plain_number(value: float, _: int | None = None) -> str:
    return f"{value:g}"


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
