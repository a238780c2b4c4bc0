"""The report of `fst.pack`: what runs in each layer, and the times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fst.backends.timing import Timing
from fst.basics.machine import processor
from fst.basics.text import table
from fst.inference.chained import APART, TOGETHER, Chain
from fst.inference.packed import LIBRARY, WAYS, PackedLayer
from fst.layers.checks import refuses_packing
from fst.ops.cpp.zeros_weight import ACTIVATIONS

NOTHING_GAINED = "nothing gained here"
LAYER_HEADER = ("layer", "weight", "density", "with", "library, ms", "zeros, ms", "runs")
CHAIN_HEADER = ("layers", "one by one, ms", "in one go, ms", "run")
PLAIN, DENSE, PACKED = "plain", "dense, batch norm folded", "packed"


@dataclass(frozen=True)
class PackedRow:
    """A layer of a packed model, for the example input.

    Attributes:
        name: in the model.
        shape: of the weight.
        density: share of the weight that is not zero, 0 to 1.
        follows: what became part of the layer: "batch norm", "residual", an activation.
        runs: one of WAYS.
        library: milliseconds of the library's product, all that follows included; None where
            nothing was timed.
        zeros: milliseconds of the fastest product by zeros; None where it cannot run.
        reason: why the layer is not packed; "" if it is.
    """

    name: str
    shape: tuple[int, ...]
    density: float
    follows: tuple[str, ...] = ()
    runs: str = WAYS[LIBRARY]
    library: Timing | None = None
    zeros: Timing | None = None
    reason: str = ""


@dataclass(frozen=True)
class ChainRow:
    """Layers of a packed model that can be computed in one go, for the example input.

    Attributes:
        layers: names, in order; one of the layers is depthwise.
        apart: milliseconds of all of them, one by one; None where nothing was timed.
        together: milliseconds in one go.
        runs: APART or TOGETHER.
    """

    layers: tuple[str, ...]
    apart: Timing | None
    together: Timing | None
    runs: str


@dataclass(frozen=True)
class PackReport:
    """Times and choices of `pack`; ``str()`` is a table of the layers and the verdict.

    Attributes:
        layers: in the order of the model, each as it runs where it is computed alone.
        chains: layers around a depthwise one, as they run together.
        times: milliseconds of the whole model: as it was given ("plain"), packed but without zeros
            left out ("dense, batch norm folded"), and "packed".
        difference: largest difference between the outputs and the plain model's, relative to the
            largest value of that output; None where no output is a tensor.
        shapes: of the example input.
        dtype: of the products.
        threads: of torch.
    """

    layers: tuple[PackedRow, ...]
    chains: tuple[ChainRow, ...]
    times: dict[str, Timing]
    difference: float | None
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    threads: int

    @property
    def gained(self) -> bool:
        """True if some layer does not run by the library: the model is faster then."""
        zeros = any(row.runs != WAYS[LIBRARY] for row in self.layers)
        return zeros or any(row.runs == TOGETHER for row in self.chains)

    @property
    def verdict(self) -> str:
        """The whole model's times in words."""
        packed, dense, plain = (self.times[name].median for name in (PACKED, DENSE, PLAIN))
        if not self.gained:
            return (
                f"by zeros: {NOTHING_GAINED}: every layer runs by the library "
                f"({plain / packed:.2f} times as fast as the plain model)"
            )
        return (
            f"packed, the model is {dense / packed:.2f} times as fast as with batch norm folded, "
            f"and {plain / packed:.2f} times as fast as the plain one"
        )

    def __str__(self) -> str:
        rows = [
            (
                row.name,
                "x".join(map(str, row.shape)),
                f"{row.density:.3f}",
                ", ".join(row.follows) or "-",
                row.library or "-",
                row.zeros or "-",
                row.reason or row.runs,
            )
            for row in self.layers
        ]
        whole = [(name, str(timing)) for name, timing in self.times.items()]
        shapes = ", ".join("x".join(map(str, shape)) for shape in self.shapes)
        outputs = "no output is a tensor that could be compared"
        if self.difference is not None:
            outputs = f"outputs differ by {self.difference:.1e} of their largest value"
        chains = [
            (" + ".join(row.layers), row.apart or "-", row.together or "-", row.runs)
            for row in self.chains
        ]
        lines = (
            table(LAYER_HEADER, rows),
            *([table(CHAIN_HEADER, chains)] if chains else []),
            table(("whole model", "ms: median (quartiles)"), whole),
            f"{processor()}, {self.threads} thread(s), {self.dtype}, input {shapes}; {outputs}",
            self.verdict,
        )
        return "\n\n".join(lines)


def packed_layers(model: nn.Module) -> dict[str, PackedLayer]:
    """The packed layers of a model, by name."""
    return {n: layer for n, layer in model.named_modules() if isinstance(layer, PackedLayer)}


def layer_rows(plain: nn.Module, packed: nn.Module) -> tuple[PackedRow, ...]:
    """Rows of the layers of the plain model."""
    rows, layers = [], packed_layers(packed)
    for name, module in plain.named_modules():
        if not isinstance(module, nn.Conv2d | nn.Linear):
            continue
        weight = module.weight.detach()
        density = float(weight.count_nonzero() / max(weight.numel(), 1))
        shape, layer = tuple(weight.shape), layers.get(name)
        if layer is None:
            reason = refuses_packing(module) or "not called on its own"
            rows.append(PackedRow(name, shape, density, reason=reason))
            continue
        times = next(iter(layer.times.values()), {})
        zeros = [timing for lanes, timing in times.items() if lanes != LIBRARY]
        lanes = LIBRARY if layer.only_library else next(iter(layer.chosen.values()), LIBRARY)
        follows = ["batch norm"] if layer.norms else []
        follows += ["residual"] if any(key[3] for key in layer.chosen) else []
        follows += [ACTIVATIONS[layer.activation]]
        rows.append(
            PackedRow(
                name,
                shape,
                density,
                tuple(filter(None, follows)),
                WAYS[lanes],
                times.get(LIBRARY),
                min(zeros) if zeros else None,
            )
        )
    return tuple(rows)


def chains_of(layers: Iterable[PackedLayer]) -> list[Chain]:
    """Chains that end with one of the layers."""
    return [layer.chain for layer in layers if isinstance(layer.chain, Chain)]


def chain_rows(layers: Iterable[PackedLayer]) -> tuple[ChainRow, ...]:
    """Rows of the chains that end with one of the layers."""
    rows = []
    for chain in chains_of(layers):
        key, times = next(iter(chain.times.items()), (None, {}))
        together = key is not None and chain.chosen[key] and not chain.layers[-1].only_library
        names = tuple(layer.layer_name for layer in chain.layers)
        runs = TOGETHER if together else APART
        rows.append(ChainRow(names, times.get(APART), times.get(TOGETHER), runs))
    return tuple(rows)
