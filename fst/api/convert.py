"""Layers of a model become sparse layers, in place."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from fst.api.report import ConversionReport, notes_on_speed, table_of
from fst.api.selection import LAYERS, kept_dense, never_called, shared_parameters
from fst.basics.selectors import Selector, selected
from fst.basics.sharding import ORDER, refuse_sharded
from fst.basics.text import suggest
from fst.basics.values import check_module, one_of
from fst.files.records import drop_record
from fst.layers.calls import LayerCall, SeenInput, each_call, try_calls
from fst.layers.coverage import inputs_of, multiply_adds
from fst.layers.modules import SparseConv2d, SparseLayer, SparseLinear, sparse_layers
from fst.rules.masks import INTEGERS, read_pattern
from fst.rules.strategy import Strategy
from fst.strategies.registry import get_strategy, options_of, registered

Patterns = Mapping[str, str]  # name pattern of layers -> "n:m"
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
KINDS = "convolution or linear layer"


def register_layer(sparse: type[SparseLayer]) -> type[SparseLayer]:
    """Class decorator: layers of exactly the type ``sparse.dense_class`` can become ``sparse``.

    ``sparse`` is a subclass of `SparseConv2d` or `SparseLinear`, and of ``dense_class``. It
    computes what ``dense_class`` computes. Its `weight_as_conv` gives the weight that is pruned;
    its forward pass prepares the input.
    """
    SPARSE_CLASSES[sparse.dense_class] = sparse
    return sparse


def sparse_class(kind: type[nn.Module]) -> type[SparseLayer] | None:
    """The sparse class of layers of type ``kind``; None if they stay dense.

    The module fst.integrations.L, if there is one, registers the classes of library L.
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
    layers: str = "conv",
    patterns: Patterns | None = None,
    example_input: Tensor | tuple[Any, ...] | None = None,
    **options: Any,
) -> ConversionReport:
    """Make layers of ``model`` sparse in place.

    A layer's class is changed; its Parameters stay the same objects with the same values, and the
    state_dict keeps the keys of the dense model.

    Args:
        model: any module.
        strategy: a name or a `Strategy`.
        include: glob patterns on layer names (a pattern also matches everything below that name)
            or layer types; if None, ``layers`` decides.
        exclude: patterns and types, as in ``include``, of layers that stay dense.
        layers: "conv", every `nn.Conv2d`; "linear", every `nn.Linear` but the classifier's head;
            "all", both, without the patch embedding. Layers with fewer input channels than the
            strategy asks for stay dense, and so do layers whose weight needs no gradient.
        patterns: name pattern -> "n:m", for layers whose weights have another N:M than the
            strategy's (`fst.patterns` makes them for a budget). The last pattern that matches
            counts. What the strategy prunes of other operands stays as it is.
        example_input: one batch (N, ...), or a tuple of inputs, for the report: its multiply-adds,
            and which GEMMs run accelerated for it. The model runs on it once, dense, in eval mode.
            Then each layer that may be accelerated is called forwards and backwards on random
            tensors of the same shapes; where times decide, they are measured, as in a first step.
        options: of the strategy, where it is given by its name, as `fst.get_strategy` takes them:
            ``fst.convert(model, "srste", decay=1e-3)``.

    Returns:
        A report of every convolution and linear layer: converted, or skipped and why, and the
        share of the model that is converted. It also names the weights of `nn.MultiheadAttention`,
        which has no layers to convert.

    Raises:
        ValueError: nothing was converted, a pattern matches no layer, ``layers`` is unknown, or
            given beside ``include``, an option is not the strategy's, or ``patterns`` are given for
            a strategy that prunes no weight to N:M.
        TypeError: ``model`` is not a module, a selector neither a string nor a module type, or
            ``example_input`` neither a tensor nor a tuple.
    """
    check_module(model)
    refuse_sharded(model, "convert", ORDER)
    _check_options(strategy, options)
    strategy = get_strategy(strategy, **options)
    check_layers(layers, include)
    check_patterns(patterns)
    modules, skipped = choose(model, strategy, include, exclude, layers)
    own = _with_patterns(strategy, patterns or {}, modules)
    for name, reason in _tied_to_others(model, modules, own).items():
        skipped[name] = reason
        del modules[name]
    if not modules:
        report = ConversionReport(str(strategy), skipped)
        again = " Call fst.unconvert(model) first." if sparse_layers(model) else ""
        raise ValueError(
            f"nothing to convert in {type(model).__name__} with strategy={strategy.name!r}, "
            f"layers={layers!r}, include={include!r}, exclude={exclude!r}.{again}\n{report}"
        )
    seen: dict[str, list[SeenInput]] = {name: [] for name in modules}
    counted = None
    if example_input is not None:
        with _recorded_inputs(model, inputs_of(example_input), seen):
            counted = multiply_adds(model, example_input)
    for name, module in modules.items():
        drop_record(module)
        layer = SPARSE_CLASSES[type(module)].sparsify(module, own[name], name)
        if seen[name] and own[name].skips_zeros:
            try_calls(layer, seen[name])
    covered = table_of(model, skipped, counted)
    device = next(iter(sparse_layers(model).values())).weight.device.type
    notes = notes_on_speed(strategy, [row for row in covered.rows if row.gemms], device)
    return ConversionReport(str(strategy), skipped, covered, notes)


@contextmanager
def _recorded_inputs(
    model: nn.Module, given: tuple[Any, ...], seen: Mapping[str, list[SeenInput]]
) -> Iterator[None]:
    """Record in ``seen`` the inputs of its layers, as meta tensors, while the block runs.

    Those that the model is ``given`` need no gradient.
    """

    def record(call: LayerCall) -> None:
        if call.name in seen and not call.input.is_meta:
            like = torch.empty_like(call.input, device="meta")
            zeros = 1 - call.input.count_nonzero().item() / max(call.input.numel(), 1)
            is_given = any(call.input is value for value in given)
            seen[call.name].append(SeenInput(like.requires_grad_(not is_given), zeros))

    with each_call(model, tuple(SPARSE_CLASSES), record):
        yield


def choose(
    model: nn.Module,
    strategy: Strategy,
    include: Selector | Iterable[Selector] | None,
    exclude: Selector | Iterable[Selector] | None,
    layers: str,
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The layers that `convert` makes sparse, and why it leaves each other one dense, by name."""
    candidates = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (*SPARSE_CLASSES, *UNSUPPORTED_CLASSES)) or _is_lazy(module)
    }
    included, excluded = (
        set() if chosen is None else selected(argument, chosen, candidates, KINDS)
        for argument, chosen in (("include", include), ("exclude", exclude))
    )
    modules: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    impossible = never_called(model)
    dense = kept_dense(model, layers) if include is None else {}
    for name, module in candidates.items():
        reason = impossible.pop(name, None) or _reason_to_skip(module, strategy)
        if reason is None and name in excluded:
            reason = "excluded"
        if reason is None and include is None:
            reason = dense.get(name) or _too_few_channels(module, strategy) or _fixed(module)
        elif reason is None and name not in included:
            reason = "not included"
        if reason is None:
            modules[name] = module
        else:
            skipped[name] = reason
    return modules, skipped | impossible


def check_patterns(patterns: Patterns | None) -> None:
    """Raise unless `convert` takes ``patterns``, whatever the model is."""
    if patterns is None:
        return
    if not isinstance(patterns, Mapping):
        raise TypeError(f"patterns={patterns!r} must map layer names to 'n:m'.")
    for name, pattern in patterns.items():
        if not isinstance(name, str):
            raise TypeError(f"patterns: {name!r} must be the name pattern of layers, a string.")
        read_pattern(f"patterns[{name!r}]", pattern)


def _with_patterns(
    strategy: Strategy, patterns: Patterns, modules: Mapping[str, nn.Module]
) -> dict[str, Strategy]:
    """The strategy of each layer."""
    own = dict.fromkeys(modules, strategy)
    for name, pattern in patterns.items():
        changed = strategy.with_pattern(*read_pattern(f"patterns[{name!r}]", pattern))
        own |= dict.fromkeys(selected("patterns", name, modules, "converted layer"), changed)
    return own


def _check_options(strategy: str | Strategy, options: Mapping[str, Any]) -> None:
    """Raise ValueError where an option is neither the strategy's nor an argument of `convert`."""
    if isinstance(strategy, Strategy) or not options:
        return  # get_strategy refuses options of a finished one
    name = registered(str(strategy).partition(",")[0])
    own = options_of(name)
    unknown = [option for option in options if option not in own]
    if unknown:
        arguments = [
            n for n in inspect.signature(convert).parameters if n not in ("model", "options")
        ]
        raise ValueError(
            f"{unknown[0]!r} is neither an argument of convert nor an option of strategy "
            f"{name!r}.{suggest(unknown[0], [*own, *arguments])}"
        )


def check_layers(layers: str, include: object) -> None:
    """Raise ValueError unless `convert` takes ``layers`` beside ``include``."""
    one_of("layers", layers, LAYERS)
    if include is not None and layers != "conv":
        raise ValueError(
            f"layers={layers!r} beside include={include!r}: include names all that is converted. "
            "Leave layers out, or leave out include and narrow the choice with exclude."
        )


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
    if module.weight.dtype not in INTEGERS:
        allowed = ", ".join(map(str, INTEGERS))
        return f"its weight is {module.weight.dtype}; only {allowed} are pruned"
    if isinstance(module, UNSUPPORTED_CLASSES):
        return f"{type(module).__name__} is not supported; only Conv2d and Linear are"
    sparse = sparse_class(type(module))
    if sparse is None:
        base = "Conv2d" if isinstance(module, nn.Conv2d) else "Linear"
        return f"{type(module).__name__} is a subclass of {base} that may compute something else"
    return sparse.obstacle(strategy)


def _tied_to_others(
    model: nn.Module, modules: Mapping[str, nn.Module], own: Mapping[str, Strategy]
) -> dict[str, str]:
    """The chosen layers whose weight is also another's, which would not compute with the same S(W).

    A folded or exported model could not hold both values in one Parameter.
    """
    found = {}
    for users in shared_parameters(model):
        weights = {name for name, key in users if key == "weight" and name in modules}
        kinds = {(type(modules[name]), own[name]) for name in weights}
        drawn = any(own[name].draws_masks for name in weights)
        if len(weights) == len(users) and len(kinds) == 1 and not drawn:
            continue
        for name in weights:
            others = [f"{n}.{k}".lstrip(".") for n, k in users if n != name]
            found[name] = f"shares its weight with {', '.join(others)}, not pruned alike"
    return found


def _fixed(module: nn.Module) -> str | None:
    """A weight that nobody trains may be a table or a fixed transform, as YOLO's DFL layer is."""
    weight = module._parameters["weight"]
    if weight is None or weight.requires_grad:
        return None
    return "the weight needs no gradient; include the layer to prune it"


def _too_few_channels(module: nn.Module, strategy: Strategy) -> str | None:
    width = "in_features" if isinstance(module, nn.Linear) else "in_channels"
    channels: int = getattr(module, width)
    if channels < strategy.min_in_channels:
        return (
            f"{channels} input channels; {strategy.name} converts from "
            f"{strategy.min_in_channels} on"
        )
    return None
