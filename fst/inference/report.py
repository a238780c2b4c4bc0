"""The report of `fst.pack`: what runs in each layer, and the times."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from fst.backends.timing import Timing
from fst.basics.machine import processor
from fst.basics.text import table
from fst.inference.chained import APART
from fst.inference.checks import refuses_packing
from fst.inference.choosing import Choice, fastest
from fst.inference.packed import LIBRARY, packed_layers

NOTHING_GAINED = "nothing gained here"
DEFAULTS = (LIBRARY, APART)
LAYER_HEADER = ("layer", "weight", "density", "with", "library, ms", "own, ms", "runs", "because")
CHAIN_HEADER = ("layers", "one by one, ms", "in one go, ms", "run", "because")
PLAIN, DENSE, PACKED = "plain", "dense, batch norm folded", "packed"
BFLOAT16 = "packed, bfloat16"


@dataclass(frozen=True)
class PackedRow:
    """The way in which a layer of a packed model runs for the example input, or layers in one go.

    Attributes:
        name: in the model; of several layers joined by " + ".
        runs: the way that was chosen; "" where the layer is not packed.
        reason: why.
        times: milliseconds of each way, all that follows included; empty where nothing was timed.
        shape: of the weight.
        density: share of the weight that is not zero, 0 to 1.
        follows: what became part of the layer: "batch norm", "residual", an activation.
    """

    name: str
    runs: str = ""
    reason: str = ""
    times: dict[str, Timing] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    density: float = 1.0
    follows: tuple[str, ...] = ()

    @property
    def library(self) -> Timing | None:
        """Of the library, or of layers one by one."""
        return next((timing for way, timing in self.times.items() if way in DEFAULTS), None)

    @property
    def own(self) -> Timing | None:
        """Of the fastest other way."""
        return min((t for way, t in self.times.items() if way not in DEFAULTS), default=None)


@dataclass(frozen=True)
class PackReport:
    """Times and choices of `pack`; ``str()`` is a table of the layers and the verdict.

    Attributes:
        layers: in the order of the model, each as it runs where it is computed alone.
        chains: layers around a depthwise one, as they run together.
        times: milliseconds of the whole model: as it was given ("plain"), packed but without zeros
            left out ("dense, batch norm folded"), "packed", and "packed, bfloat16" where that was
            tried.
        difference: largest difference between the outputs and the plain model's, relative to the
            largest value of that output; None where no output is a tensor.
        shapes: of the example input.
        dtype: of the products.
        threads: of torch.
        bfloat16: what is known of its speed, in words.
    """

    layers: tuple[PackedRow, ...]
    chains: tuple[PackedRow, ...]
    times: dict[str, Timing]
    difference: float | None
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    threads: int
    bfloat16: str = ""

    @property
    def gained(self) -> bool:
        """True if some layer does not run by the library: the model is faster then."""
        return any(row.runs not in ("", *DEFAULTS) for row in (*self.layers, *self.chains))

    @property
    def verdict(self) -> str:
        """The whole model's times in words."""
        packed, dense, plain = (self.times[name].median for name in (PACKED, DENSE, PLAIN))
        names = [PLAIN, DENSE, *([PACKED] if self.gained else [])]
        best = f"The fastest one was {min(names, key=lambda name: self.times[name].median)!r}."
        if not self.gained:
            return (
                f"by zeros: {NOTHING_GAINED}: every layer runs by the library "
                f"({plain / packed:.2f} times as fast as the plain model). {best}"
            )
        own = sum(row.runs not in ("", *DEFAULTS) for row in self.layers)
        return (
            f"packed, the model is {dense / packed:.2f} times as fast as with batch norm folded, "
            f"and {plain / packed:.2f} times as fast as the plain one; {own} of "
            f"{len(self.layers)} layers run by kernels of this package. {best}"
        )

    def __str__(self) -> str:
        rows = [
            (
                row.name,
                "x".join(map(str, row.shape)),
                f"{row.density:.3f}",
                ", ".join(row.follows) or "-",
                row.library or "-",
                row.own or "-",
                row.runs or "not packed",
                row.reason,
            )
            for row in self.layers
        ]
        chains = [
            (row.name, row.library or "-", row.own or "-", row.runs, row.reason)
            for row in self.chains
        ]
        whole = [(name, str(timing)) for name, timing in self.times.items()]
        shapes = ", ".join("x".join(map(str, shape)) for shape in self.shapes)
        outputs = "no output is a tensor that could be compared"
        if self.difference is not None:
            outputs = f"outputs differ by {self.difference:.1e} of their largest value"
        batch = self.shapes[0][0] if self.shapes and self.shapes[0] else 1
        lines = (
            table(LAYER_HEADER, rows),
            *([table(CHAIN_HEADER, chains)] if chains else []),
            table(("whole model", "ms: median (quartiles)"), whole),
            f"{processor()}, {torch.backends.cpu.get_cpu_capability()}, {self.threads} thread(s), "
            f"{self.dtype}, batch {batch}, input {shapes}; {outputs}",
            self.verdict,
            *([self.bfloat16] if self.bfloat16 else []),
        )
        return "\n\n".join(lines)


def layer_rows(plain: nn.Module, packed: nn.Module) -> tuple[PackedRow, ...]:
    """Rows of the layers of the plain model."""
    rows, layers = [], packed_layers(packed)
    for name, module in plain.named_modules():
        if not isinstance(module, nn.Conv2d | nn.Linear):
            continue
        weight = module.weight.detach()
        density = float(weight.count_nonzero() / max(weight.numel(), 1))
        layer = layers.get(name)
        if layer is None:
            reason = refuses_packing(module) or "not called on its own"
            rows.append(PackedRow(name, "", reason, {}, tuple(weight.shape), density))
            continue
        row, rest = _row(layer.choice), (tuple(weight.shape), density, layer.follows)
        rows.append(PackedRow(name, row.runs, row.reason, row.times, *rest))
    return tuple(rows)


def chain_rows(packed: nn.Module) -> tuple[PackedRow, ...]:
    """Rows of layers that may be computed in one go."""
    return tuple(_row(choice) for choice in choices_of(packed) if len(choice.layers) > 1)


def choices_of(packed: nn.Module) -> list[Choice]:
    """Of the layers, and of chains of them."""
    layers = packed_layers(packed).values()
    own = [layer.choice for layer in layers]
    return own + [layer.chain.choice for layer in layers if layer.chain]


def _row(choice: Choice) -> PackedRow:
    times = next(iter(choice.times.values()), {})
    name, runs = " + ".join(choice.layers), choice.first or LIBRARY
    if choice.allowed:
        return PackedRow(name, choice.first, "the whole model gains nothing otherwise", times)
    return PackedRow(name, runs, fastest(times)[1] if times else "the only way", times)
