"""The report of `fst.pack`: what runs in each layer, and the times."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fst.backends.timing import Timing
from fst.basics.machine import processor
from fst.basics.text import table
from fst.inference.checks import refuses_packing
from fst.inference.packed import packed_layers
from fst.inference.plans import Plans
from fst.layers.table import WEIGHTS, Columns, GemmReport, LayerRow, LayerTable
from fst.ops.backends.packed import LIBRARY

NOTHING_GAINED = "nothing gained here"
PLAIN, FOLDED, PACKED = "plain", "dense, batch norm folded", "packed"
BFLOAT16 = "packed, bfloat16"
LAYERS: Columns = {
    "layer": lambda row: row.name.removesuffix(".weight"),
    "weight": lambda row: WEIGHTS["shape"](row) or "-",
    "density": WEIGHTS["density"],
    "with": lambda row: ", ".join(row.follows) or "-",
    "runs": lambda row: row.decision.backend or "not packed",
    "because": lambda row: row.reason or row.decision.reason,
    "measured ms": lambda row: row.decision.measured or "-",
}


@dataclass(frozen=True)
class PackReport:
    """Times and choices of `pack`; ``str()`` is a table of the layers and the verdict.

    Attributes:
        layers: in the order of the model, each as it runs where it is computed alone.
        chains: layers around a depthwise one, as they run together.
        times: milliseconds of the whole model: as it was given ("plain"), packed with all layers by
            the library ("dense, batch norm folded"), "packed", and "packed, bfloat16" where that
            was tried.
        difference: largest difference between the outputs and the plain model's, relative to the
            largest value of that output; None where no output is a tensor.
        shapes: of the example input.
        dtype: of the products.
        threads: of torch.
        bfloat16: a sentence about its speed.
    """

    layers: tuple[LayerRow, ...]
    chains: tuple[LayerRow, ...]
    times: dict[str, Timing]
    difference: float | None
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    threads: int
    bfloat16: str = ""

    @property
    def gained(self) -> bool:
        """True if some layer does not run by the library: the model is faster then."""
        rows = (*self.layers, *self.chains)
        return any(row.decision.backend not in LIBRARY for row in rows)

    @property
    def verdict(self) -> str:
        """A sentence about the whole model's times."""
        packed, dense, plain = (self.times[name].median for name in (PACKED, FOLDED, PLAIN))
        fastest = min((PLAIN, FOLDED, PACKED), key=lambda name: self.times[name].median)
        best = f"The fastest one was {fastest!r}."
        if not self.gained:
            return (
                f"by zeros: {NOTHING_GAINED}: every layer runs by the library "
                f"({plain / packed:.2f} times as fast as the plain model). {best}"
            )
        own = sum(row.decision.backend not in LIBRARY for row in self.layers)
        return (
            f"packed, the model is {dense / packed:.2f} times as fast as with batch norm folded, "
            f"and {plain / packed:.2f} times as fast as the plain one; {own} of "
            f"{len(self.layers)} layers run by kernels of this package. {best}"
        )

    def __str__(self) -> str:
        shapes = ", ".join("x".join(map(str, shape)) for shape in self.shapes)
        outputs = "no output is a tensor that could be compared"
        if self.difference is not None:
            outputs = f"outputs differ by {self.difference:.1e} of their largest value"
        lines = (
            LayerTable((*self.layers, *self.chains)).text(LAYERS),
            table(("whole model", "ms: median (quartiles)"), self.times.items()),
            f"{processor()}, {torch.backends.cpu.get_cpu_capability()}, {self.threads} thread(s), "
            f"{self.dtype}, input {shapes}; {outputs}",
            self.verdict,
            *([self.bfloat16] if self.bfloat16 else []),
        )
        return "\n\n".join(lines)


def layer_rows(plain: nn.Module, packed: nn.Module) -> tuple[LayerRow, ...]:
    """Rows of the layers of the plain model."""
    rows, layers = [], packed_layers(packed)
    for name, module in plain.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            weight = module.weight.detach()
            density = float(weight.count_nonzero() / max(weight.numel(), 1))
            row, layer = (f"{name}.weight", tuple(weight.shape)), layers.get(name)
            if layer is None:
                reason = refuses_packing(module) or "not called on its own"
                rows.append(LayerRow(*row, reason=reason, density=density))
            else:
                gemms, follows = _product(layer.plans), layer.follows
                rows.append(LayerRow(*row, density=density, gemms=gemms, follows=follows))
    return tuple(rows)


def chain_rows(packed: nn.Module) -> tuple[LayerRow, ...]:
    """Rows of layers that one kernel may compute."""
    return tuple(
        LayerRow(" + ".join(of.layer_name for of in chain.layers), (), gemms=_product(chain.plans))
        for chain in (layer.chain for layer in packed_layers(packed).values())
        if chain
    )


def plans_of(packed: nn.Module) -> list[Plans]:
    """Of the layers, and of chains of them."""
    layers = packed_layers(packed).values()
    return [*(of.plans for of in layers), *(of.chain.plans for of in layers if of.chain)]


def _product(plans: Plans) -> dict[str, GemmReport]:
    mode = "accelerated" if plans.decision.skipped else "dense"
    return {"output": GemmReport(mode, "", plans.decision.reason, plans.decision)}
