"""Into sparse layers and back: `convert` in place, `fold` into plain layers that hold S(W)."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from fst.basics.sharding import LOAD, ORDER, refuse_sharded
from fst.basics.values import check_module, one_of
from fst.layers.coverage import multiply_adds
from fst.layers.modules import SparseConv2d, SparseLayer, SparseLinear, sparse_layers
from fst.report import ConversionReport, coverage_of, describe_layer
from fst.rules.by_name import planned_rules
from fst.rules.strategy import Strategy
from fst.selection import LAYERS, kept_dense, never_called
from fst.strategies.registry import get_strategy

SPARSE_CLASSES: dict[type[nn.Module], type[SparseLayer]] = {
    sparse.dense_class: sparse for sparse in (SparseConv2d, SparseLinear)
}
UNSUPPORTED_CLASSES = (
    nn.Conv1d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Bilinear,
)
Selector = str | type[nn.Module]


def register_layer(sparse: type[SparseLayer]) -> type[SparseLayer]:
    """Class decorator: layers of exactly the type ``sparse.dense_class`` can become ``sparse``.

    A subclass of `SparseConv2d` or `SparseLinear` and of that type, which computes what that type
    computes: its `weight_as_conv` gives what is pruned, its forward pass prepares the input.
    """
    SPARSE_CLASSES[sparse.dense_class] = sparse
    return sparse


def sparse_class(kind: type[nn.Module]) -> type[SparseLayer] | None:
    """What a layer of type ``kind`` becomes; None if it stays dense.

    The classes of library L are registered by the module fst.integrations.L, if there is one.
    """
    if kind not in SPARSE_CLASSES:
        module = f"fst.integrations.{kind.__module__.partition('.')[0]}"
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(module)
    return SPARSE_CLASSES.get(kind)


def convert(
    model: nn.Module,
    strategy: str | Strategy,
    *,
    include: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] | None = None,
    plan: Mapping[str, Mapping[str, Any] | None] | None = None,
    layers: str = "conv",
    example_input: Tensor | tuple[Any, ...] | None = None,
) -> ConversionReport:
    """Make layers of ``model`` sparse in place.

    A layer's class is changed; its Parameters stay the same objects with the same values, and the
    state_dict keeps the keys of the dense model.

    Args:
        model: any module.
        strategy: a name or a `Strategy`.
        include: glob patterns on layer names (a pattern also matches everything below that name)
            or layer types; if None, ``layers`` decides.
        exclude: likewise, what to leave dense.
        plan: layer name -> how its grad_weight is pruned instead, as `fst.plan` returns it:
            ``{"layer1.0.conv1": {"rule": "sampled", "keep": 4}, "layer4.1.conv2": None}``. Layers
            of too few input channels for the strategy stay dense, and the report says so.
        layers: "conv", every `nn.Conv2d`; "linear", every `nn.Linear` but the classifier's head;
            "all", both, without the patch embedding. Those with fewer input channels than the
            strategy asks for stay dense.
        example_input: one batch (N, ...), or a tuple of inputs, for the multiply-adds in the
            report: the model runs on it once, dense, in eval mode.

    Returns:
        A report of every convolution and linear layer: converted, or skipped and why; and which
        share of the model that is. Weights of `nn.MultiheadAttention`, which has no layers to
        convert, are named in it too.

    Raises:
        ValueError: nothing was converted, a pattern or a name in ``plan`` matches no layer, or
            ``layers`` is unknown, or given beside ``include``.
        TypeError: ``model`` is not a module, a selector neither a string nor a module type, or
            ``plan`` no mapping, or ``example_input`` neither a tensor nor a tuple.
    """
    check_module(model)
    refuse_sharded(model, "convert", ORDER)
    strategy = get_strategy(strategy)
    check_layers(layers, include)
    candidates = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (*SPARSE_CLASSES, *UNSUPPORTED_CLASSES)) or _is_lazy(module)
    }
    if plan and strategy.schedule is not None:
        raise ValueError(f"plan: strategy {strategy.name!r} has a schedule, which needs one rule.")
    planned = planned_rules(plan)
    included = _matches("include", include, candidates)
    excluded = _matches("exclude", exclude, candidates)
    report = ConversionReport(str(strategy))
    chosen: list[str] = []
    impossible = never_called(model)
    dense = kept_dense(model, layers) if include is None else {}
    for name, module in candidates.items():
        reason = impossible.pop(name, None) or _reason_to_skip(module, strategy)
        if reason is None and name in excluded:
            reason = "excluded"
        if reason is None and include is not None and name not in included:
            reason = "not included"
        if reason is None and include is None:
            reason = dense.get(name)
        if reason is None and include is None:
            reason = _too_few_channels(module, strategy)
            if reason is not None and planned.pop(name, None) is not None:
                reason += "; its rule in the plan is not used"
        if reason is not None:
            report.skipped[name] = reason
            continue
        chosen.append(name)
    report.skipped.update(impossible)
    missing = [name for name in planned if name not in chosen]
    if missing:
        raise ValueError(f"plan: {missing[0]!r} is no layer that is converted; {_listed(chosen)}")
    if not chosen:
        raise ValueError(
            f"nothing to convert in {type(model).__name__} with strategy={strategy.name!r}, "
            f"layers={layers!r}, include={include!r}, exclude={exclude!r}.\n{report}"
        )
    counted = None if example_input is None else multiply_adds(model, example_input)
    for name in chosen:
        rule = planned.get(name, strategy.grad_weight)
        if rule is not None:
            rule = rule.with_prefix_tokens(_prefix_tokens(model, name))
        own = strategy if rule is strategy.grad_weight else replace(strategy, grad_weight=rule)
        module = candidates[name]
        layer = SPARSE_CLASSES[type(module)].sparsify(module, own, name)
        report.layers.append(describe_layer(layer))
    report.covered = coverage_of(model, report.skipped, counted)
    return report


def check_layers(layers: str, include: object) -> None:
    """Raise ValueError unless `convert` takes ``layers`` beside ``include``."""
    one_of("layers", layers, LAYERS)
    if include is not None and layers != "conv":
        raise ValueError(
            f"layers={layers!r} beside include={include!r}: include names all that is converted. "
            "Leave layers out, or leave out include and narrow the choice with exclude."
        )


def _listed(names: list[str]) -> str:
    return f"converted layers: {', '.join(names) or 'none'}."


def fold(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """Plain `nn.Conv2d` and `nn.Linear` holding S(W): the same outputs as ``model`` in eval mode.

    A layer of another class that was converted becomes that class again, unless that computes its
    weight (timm's StdConv2d): from S(W) it would compute another one, so it becomes plain too. A
    Parameter that layers share stays shared where all of them compute with the same S(W); elsewhere
    each folded layer gets one of its own.

    Args:
        model: a converted model; it is left as it is unless ``inplace``.
        inplace: change ``model`` itself; its dense weights are lost.

    Raises:
        ValueError: no layer of ``model`` is converted, or the weight of one is computed from other
            parameters.
    """
    layers = sparse_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no converted layer: nothing to fold.")
    refuse_sharded(model, "fold", LOAD)
    for name, layer in layers.items():
        if layer._parameters.get("weight") is None:
            raise ValueError(
                f"layer {name!r}: its weight is computed from other parameters, which would not "
                "hold S(W): call torch.nn.utils.parametrize.remove_parametrizations, "
                "remove_weight_norm, remove_spectral_norm or prune.remove first."
            )
    weights = {name: layer.effective_weight() for name, layer in layers.items()}
    if not inplace:
        model = copy.deepcopy(model)
        layers = sparse_layers(model)
    users: dict[Tensor, list[Tensor | None]] = {}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            users.setdefault(parameter, []).append(weights.get(name) if key == "weight" else None)
    for name, layer in layers.items():
        weight, folded = layer.weight, weights[name]
        others = [other for other in users[weight] if other is not folded]
        if any(other is None or not torch.equal(other, folded) for other in others):
            layer.weight = nn.Parameter(torch.empty_like(weight), weight.requires_grad)
        layer.densify(folded)
    return model


def _prefix_tokens(model: nn.Module, name: str) -> int:
    """How many class tokens and registers there are, as the innermost module around a layer says.

    timm's have ``num_prefix_tokens``, torchvision's ``class_token``, (1, tokens, channels).
    """
    inside = name.split(".")
    for depth in reversed(range(len(inside))):
        module = model.get_submodule(".".join(inside[:depth]))
        count = getattr(module, "num_prefix_tokens", None)
        if isinstance(count, int):
            return count
        token = module._parameters.get("class_token")
        if token is not None and token.dim() == 3:
            return token.shape[1]
    return 0


def _is_lazy(module: nn.Module) -> bool:
    return isinstance(getattr(module, "weight", None), UninitializedParameter)


def _reason_to_skip(module: nn.Module, strategy: Strategy) -> str | None:
    if _is_lazy(module):
        return "lazy: not initialised yet; run one batch through the model first"
    if isinstance(module, SparseLayer):
        return f"already converted ({module.strategy.name})"
    if "forward" in vars(module):
        return "its forward was replaced on the instance (as accelerate's hooks do): convert first"
    if parametrize.is_parametrized(module) or module._parameters.get("weight") is None:
        return "parametrized: its weight is computed from other parameters"
    if isinstance(module, UNSUPPORTED_CLASSES):
        return f"{type(module).__name__} is not supported; only Conv2d and Linear are"
    sparse = sparse_class(type(module))
    if sparse is None:
        base = "Conv2d" if isinstance(module, nn.Conv2d) else "Linear"
        return f"{type(module).__name__} is a subclass of {base} that may compute something else"
    return sparse.obstacle(strategy)


def _too_few_channels(module: nn.Module, strategy: Strategy) -> str | None:
    width = "in_features" if isinstance(module, nn.Linear) else "in_channels"
    channels: int = getattr(module, width)
    if channels < strategy.min_in_channels:
        return (
            f"{channels} input channels; {strategy.name} converts from "
            f"{strategy.min_in_channels} on"
        )
    return None


def _matches(
    argument: str,
    selectors: Selector | Iterable[Selector] | None,
    candidates: dict[str, nn.Module],
) -> set[str]:
    """Names of the candidates that any selector matches."""
    if selectors is None:
        return set()
    if isinstance(selectors, str) or not isinstance(selectors, Iterable):
        selectors = [selectors]
    found: set[str] = set()
    for selector in selectors:
        if isinstance(selector, str):
            names = {n for n in candidates if _name_matches(n, selector)}
        elif isinstance(selector, type) and issubclass(selector, nn.Module):
            names = {n for n, module in candidates.items() if isinstance(module, selector)}
        else:
            raise TypeError(
                f"{argument}={selector!r}: a selector is a name pattern or a module type."
            )
        if not names:
            raise ValueError(
                f"{argument}={selector!r} matches no convolution or linear layer. "
                f"Layers: {', '.join(candidates) or 'none'}."
            )
        found |= names
    return found


def _name_matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
