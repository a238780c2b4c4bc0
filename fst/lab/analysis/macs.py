"""Multiply-adds of each GEMM of each layer in one real training step, and what a strategy leaves.

Counted are `nn.Conv2d` and `nn.Linear`, converted or not, each call by itself (a detector's shared
head runs several times per step), in the step that the user gives: GEMMs that autograd does not
compute (for weights and inputs that need no gradient) cost nothing. Such counts are FST's Figure 2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from fst.api.report import NOT_COMPUTED, describe_layer
from fst.basics.text import table
from fst.basics.values import check_module
from fst.layers.calls import LayerCall, each_call
from fst.layers.modules import SparseLayer
from fst.ops.conv import as_maps
from fst.rules.rule import Rule
from fst.rules.strategy import GEMMS

KINDS = ("conv", "linear")


class GemmMacs(NamedTuple):
    """Multiply-adds of one GEMM of a layer, all calls of a step together.

    Attributes:
        dense: what dense training needs; 0 where the GEMM is not computed.
        left: what the strategy leaves of them (a mean where the choice is random).
        mode: "dense", "simulated" or "accelerated" as in `fst.api.report`, or "not computed".
        reason: why it is so.
    """

    dense: int
    left: float
    mode: str
    reason: str


class LayerMacs(NamedTuple):
    """A layer in one step.

    Attributes:
        group: the module of the model that it belongs to, such as "backbone".
        kind: "conv" or "linear".
        maps: samples and height x width of the output, for each call (tokens: 1 x their
            number).
    """

    name: str
    group: str
    kind: str
    weight: tuple[int, ...]
    maps: tuple[tuple[int, int, int], ...]
    gemms: dict[str, GemmMacs]


class Total(NamedTuple):
    """Sums over layers and GEMMs.

    Attributes:
        dense: multiply-adds of dense training.
        sparse: those in GEMMs from which the strategy takes some away.
        left: what the strategy leaves of ``dense``.
    """

    dense: int
    sparse: int
    left: float

    @property
    def share_sparse(self) -> float:
        """Share of the multiply-adds that run sparse; NaN if there are none."""
        return self.sparse / self.dense if self.dense else float("nan")

    @property
    def share_left(self) -> float:
        """Share of the multiply-adds that the strategy leaves; NaN if there are none."""
        return self.left / self.dense if self.dense else float("nan")


@dataclass(frozen=True)
class MacReport:
    """Result of `count_macs`; ``str()`` is a table by module.

    Attributes:
        layers: the layers that ran, in the order of the model.
        idle: convolutions and linear layers that did not run.
        uncounted: modules of other types with a weight matrix, which are in no number here.
    """

    layers: tuple[LayerMacs, ...]
    idle: tuple[str, ...]
    uncounted: tuple[str, ...]

    @property
    def groups(self) -> tuple[str, ...]:
        """The modules that layers are grouped by, in the order of the model."""
        return tuple(dict.fromkeys(layer.group for layer in self.layers))

    def total(
        self, gemm: str | None = None, *, group: str | None = None, kind: str | None = "conv"
    ) -> Total:
        """Sums over a GEMM (None: all three), a module (None: all) and a kind (None: both)."""
        chosen = [
            layer
            for layer in self.layers
            if group in (None, layer.group) and kind in (None, layer.kind)
        ]
        parts = [layer.gemms[g] for layer in chosen for g in GEMMS if gemm in (None, g)]
        sparse = [part for part in parts if part.left < part.dense]
        return Total(
            sum(part.dense for part in parts),
            sum(part.dense for part in sparse),
            sum(part.left for part in parts),
        )

    def by_module(self) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        """Header and rows: per module and kind the layers, and `total_cell` of each GEMM."""
        rows: list[tuple[Any, ...]] = []
        for group, kind in itertools.product((*self.groups, None), KINDS):
            count = sum(x.kind == kind and group in (None, x.group) for x in self.layers)
            totals = [self.total(gemm, group=group, kind=kind) for gemm in (*GEMMS, None)]
            if count:
                rows.append((group or "all", kind, count, *map(total_cell, totals)))
        return ("module", "kind", "layers", *GEMMS, "three GEMMs"), rows

    def exceptions(self) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        """Header and rows: what is not computed, or dense in a GEMM that is sparse elsewhere.

        Why, in how many layers of which module, and its share of the multiply-adds of that GEMM,
        convolutions and linear layers together.
        """
        found: dict[tuple[str, ...], list[GemmMacs]] = {}
        for gemm in GEMMS:
            is_sparse = self.total(gemm, kind=None).sparse > 0
            for layer in self.layers:
                macs = layer.gemms[gemm]
                if macs.mode == NOT_COMPUTED or (is_sparse and macs.left == macs.dense):
                    key = (gemm, layer.group, layer.kind, macs.mode, macs.reason)
                    found.setdefault(key, []).append(macs)
        rows = []
        for (gemm, *rest), parts in found.items():
            dense = sum(part.dense for part in parts)
            share = f"{dense / self.total(gemm, kind=None).dense:.2%}" if dense else ""
            rows.append((gemm, *rest, len(parts), share))
        return ("GEMM", "module", "kind", "mode", "reason", "layers", "share"), rows

    def __str__(self) -> str:
        lines = [
            "multiply-adds of one step: GMAC, of which the share in sparse GEMMs -> share left",
            "",
            table(*self.by_module()),
        ]
        for title, names in (("did not run", self.idle), ("not counted", self.uncounted)):
            if names:
                lines += ["", f"{title}: {', '.join(names)}"]
        return "\n".join(lines)


def total_cell(total: Total) -> str:
    """ "12.3: 98.0 % -> 51.0 %": GMAC, share in sparse GEMMs, share of the multiply-adds left."""
    if not total.dense:
        return NOT_COMPUTED
    cell = f"{total.dense / 1e9:.3g}"
    return f"{cell}: {total.share_sparse:.1%} -> {total.share_left:.1%}" if total.sparse else cell


class _LayerCall:
    """One call of a layer: its output map, and which gradients it needed and got."""

    def __init__(self, call: LayerCall) -> None:
        layer, input, output = call.layer, call.input, call.output
        if isinstance(layer, nn.Conv2d):
            self.map = (output.shape[:-3].numel(), output.shape[-2], output.shape[-1])
        else:
            *samples, height, width = as_maps(input.shape[:-1])
            self.map = (math.prod(samples), height, width)
        needed = {"input": input.requires_grad, "weight": layer.weight.requires_grad}
        self._unneeded = {
            f"grad_{name}": name for name, is_needed in needed.items() if not is_needed
        }
        self._arrived = False
        if output.requires_grad:
            output.register_hook(self._gradient_arrived)

    def _gradient_arrived(self, _: Tensor) -> None:
        self._arrived = True

    def reason_not_computed(self, gemm: str) -> str:
        """Why ``gemm`` was not computed in this call; "" if it was."""
        if gemm in self._unneeded:
            return f"the {self._unneeded[gemm]} needs no gradient"
        return "" if gemm == "output" or self._arrived else "no gradient reached the output"


def count_macs(
    model: nn.Module, run: Callable[[], object], skipped: Mapping[str, str] | None = None
) -> MacReport:
    """Count the multiply-adds of each GEMM in what ``run`` does.

    Args:
        model: any model, converted or not.
        run: does one forward and backward pass of ``model``.
        skipped: why layers are not converted, as `ConversionReport.skipped`, for the reasons.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: no convolution or linear layer of ``model`` ran.
    """
    check_module(model)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    calls: dict[str, list[_LayerCall]] = {name: [] for name in layers}
    with each_call(model, (nn.Conv2d, nn.Linear), lambda c: calls[c.name].append(_LayerCall(c))):
        run()
    groups = group_names(layers)
    reasons = {name: "not converted" for name in layers} | dict(skipped or {})
    counted = tuple(
        _layer_macs(name, groups[name], layers[name], seen, reasons[name])
        for name, seen in calls.items()
        if seen
    )
    if not counted:
        raise ValueError(
            f"run={run!r} ran no convolution or linear layer of {type(model).__name__}."
        )
    idle = tuple(name for name, seen in calls.items() if not seen)
    return MacReport(counted, idle, _uncounted(model))


def _uncounted(model: nn.Module) -> tuple[str, ...]:
    return tuple(
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if not isinstance(module, nn.Conv2d | nn.Linear)
        and any(p.dim() > 1 for p in module.parameters(recurse=False))
    )


def _layer_macs(
    name: str, group: str, layer: nn.Module, calls: list[_LayerCall], skipped: str
) -> LayerMacs:
    gemms = {gemm: _gemm_macs(layer, gemm, calls, skipped) for gemm in GEMMS}
    kind = "conv" if isinstance(layer, nn.Conv2d) else "linear"
    maps = tuple(call.map for call in calls)
    return LayerMacs(name, group, kind, tuple(layer.weight.shape), maps, gemms)


def _gemm_macs(layer: nn.Module, gemm: str, calls: list[_LayerCall], skipped: str) -> GemmMacs:
    reasons = [call.reason_not_computed(gemm) for call in calls]
    maps = [call.map for call, reason in zip(calls, reasons, strict=True) if not reason]
    if not maps:
        return GemmMacs(0, 0.0, NOT_COMPUTED, reasons[0])
    each = [samples * height * width * layer.weight.numel() for samples, height, width in maps]
    dense = sum(each)
    if not isinstance(layer, SparseLayer):
        return GemmMacs(dense, dense, "dense", skipped)
    report = describe_layer(layer).gemms[gemm]
    rule = layer.strategy.rule(gemm)
    if rule is None:
        return GemmMacs(dense, dense, report.mode, report.reason)
    kept = [_kept(layer, gemm, rule, *place[1:]) for place in maps]
    left = sum(macs * part / whole for macs, (part, whole) in zip(each, kept, strict=True))
    if all(part == whole for part, whole in kept) and report.mode != "dense":
        words = " ".join(dict.fromkeys(f"{samples}x{p}x{q}" for samples, p, q in maps))
        return GemmMacs(dense, left, "dense", f"nothing to drop in maps {words}")
    return GemmMacs(dense, left, report.mode, report.reason)


def _kept(
    layer: SparseLayer, gemm: str, rule: Rule, height: int, width: int
) -> tuple[float, float]:
    """Return (kept, total) parts of a GEMM under ``rule``, for an output map of this size."""
    if height * width == 0:
        return 1, 1
    shape = layer.weight_as_conv().shape
    kept = rule.kept(gemm, shape, layer.conv_groups, height, width)
    if kept is not None:
        return kept
    if gemm != "output" and not rule.as_output:
        return rule.density, 1
    mask = layer.output_mask()
    return (1, 1) if mask is None else (int(mask.count_nonzero()), mask.numel())


def group_names(names: Iterable[str]) -> dict[str, str]:
    """Layer name -> the module of the model that it belongs to.

    That is the first part of the name ("backbone"), after any part that all names share.
    """
    paths = {name: name.split(".") for name in names}
    depth = 0
    while (
        len({tuple(path[: depth + 1]) for path in paths.values()}) == 1
        and min(map(len, paths.values())) > depth + 1
    ):
        depth += 1
    return {name: ".".join(path[: depth + 1]) for name, path in paths.items()}
