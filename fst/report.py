"""What a conversion did, layer by layer and GEMM by GEMM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from fst._text import table
from fst.strategy import GEMMS, NM, Alternating, Rule

if TYPE_CHECKING:
    from fst.modules import SparseLayer


class GemmReport(NamedTuple):
    """How a GEMM of a layer is computed.

    Attributes:
        mode: "dense" (nothing pruned), "simulated" (dense arithmetic on pruned values, so no time
            is saved) or "accelerated" (fewer multiply-adds are done).
        rule: what is pruned; "" where dense.
        reason: why it is so.
    """

    mode: str
    rule: str
    reason: str

    def __str__(self) -> str:
        return f"{self.mode}: {self.rule}" if self.rule else self.mode


class LayerReport(NamedTuple):
    """A converted layer: its name, the shape of its weight, and its three GEMMs."""

    name: str
    shape: tuple[int, ...]
    gemms: dict[str, GemmReport]

    def __str__(self) -> str:
        return "; ".join(f"{gemm} {report}" for gemm, report in self.gemms.items())


@dataclass
class ConversionReport:
    """What `fst.convert` did.

    Attributes:
        strategy: the strategy, in words.
        layers: one `LayerReport` for each converted layer.
        skipped: name of each layer that was left dense -> reason.
    """

    strategy: str
    layers: list[LayerReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def converted(self) -> dict[str, str]:
        """Name of each converted layer -> how its GEMMs are computed."""
        return {layer.name: str(layer) for layer in self.layers}

    def __str__(self) -> str:
        lines = [f"{self.strategy}: {len(self.layers)} converted, {len(self.skipped)} skipped"]
        if self.layers:
            rows = [
                (layer.name, "x".join(map(str, layer.shape)), *(layer.gemms[g].mode for g in GEMMS))
                for layer in self.layers
            ]
            lines += ["", table(("layer", "weight", *GEMMS), rows)]
            reasons = {r.reason: r.mode for layer in self.layers for r in layer.gemms.values()}
            lines += ["", *sorted(f"{mode}: {reason}" for reason, mode in reasons.items())]
        if self.skipped:
            lines += ["", table(("skipped", "reason"), self.skipped.items())]
        return "\n".join(lines)


def describe_gemms(layer: SparseLayer) -> dict[str, GemmReport]:
    """The three `GemmReport` of a converted layer."""
    outputs, channels = layer.weight.shape[:2]
    axis = {"output": channels, "grad_input": outputs // layer.conv_groups, "grad_weight": 0}
    reports = {}
    for gemm in GEMMS:
        rule = layer.strategy.rule(gemm)
        if gemm == "grad_weight" and not layer.weight.requires_grad:
            reports[gemm] = GemmReport("dense", "", "not computed, the weight is frozen")
        else:
            reports[gemm] = _describe(rule, axis[gemm])
    return reports


def _describe(rule: Rule | None, axis: int) -> GemmReport:
    if rule is None:
        return GemmReport("dense", "", "the strategy prunes nothing in this GEMM")
    if isinstance(rule, Alternating):
        share = f"1/{rule.block[0] * rule.block[1]}"
        return GemmReport(
            "accelerated", str(rule), f"strided weight gradient with {share} of the multiply-adds"
        )
    in_channel_order = getattr(rule, "group_order", "channel") == "channel"
    if isinstance(rule, NM) and in_channel_order and 0 < axis <= rule.n:
        return GemmReport(
            "dense", str(rule), f"the reduction axis has at most n={rule.n} channels: all are kept"
        )
    return GemmReport("simulated", str(rule), "dense arithmetic on pruned values")
