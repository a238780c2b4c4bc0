"""The least time a GEMM of a convolution can take on a machine, and the machine's rates.

The model: every operand is moved once, and multiply-adds run at the machine's rate; the larger of
the two times is the bound. A strategy needs fewer multiply-adds where they are really left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from fst.backends import backend
from fst.backends.timing import sample
from fst.rules.rule import Lattice
from fst.rules.strategy import GEMMS, Strategy
from fst.studies.benchmark.layers import PLAIN, LayerShape, LayerTimes

MATMUL_SIZE = {"cuda": 8192}
COPY_BYTES = {"cuda": 2**31}


class Rates(NamedTuple):
    """What a machine can do.

    Attributes:
        dense: FLOP/s; a multiply-add is two.
        bandwidth: bytes/s, read and written.
        sparse: FLOP/s of a GEMM with a 2:4 operand, its zeros counted; None: as dense.
    """

    dense: float
    bandwidth: float
    sparse: float | None = None


class Bound(NamedTuple):
    """The least time of a GEMM.

    Attributes:
        flops: that are needed; zeros of a 2:4 operand count.
        bytes: that are moved.
        limit: "compute" or "memory", whichever takes longer.
    """

    flops: float
    bytes: float
    milliseconds: float
    limit: str


def measure_rates(device: torch.device, dtype: torch.dtype, repeats: int = 15) -> Rates:
    """Best rates of a large matrix product in ``dtype`` and of a large copy."""
    size = MATMUL_SIZE.get(device.type, 1024)
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    source = torch.zeros(COPY_BYTES.get(device.type, 2**28), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    functions = {"matmul": lambda: left @ right, "copy": lambda: target.copy_(source)}
    taken = sample(functions, repeats, device)
    seconds = {name: min(samples.done) / 1e3 for name, samples in taken.items()}
    return Rates(2 * size**3 / seconds["matmul"], 2 * source.numel() / seconds["copy"])


def gemm_bound(
    shape: LayerShape,
    gemm: str,
    dtype: torch.dtype,
    rates: Rates,
    strategy: Strategy | None = None,
    *,
    accelerated: bool = False,
) -> Bound:
    """The bound of "output", "grad_input" or "grad_weight".

    Args:
        strategy: None for the dense convolution.
        accelerated: whether the pruned operand of an N:M rule is stored without its zeros, in
            which case it moves fewer bytes and the GEMM runs at the sparse rate.
    """
    rule = None if strategy is None else strategy.rule(gemm)
    positions, groups = math.prod(shape.output_size), shape.geometry.groups
    weight = (shape.out_channels, shape.in_channels // groups, *shape.kernel)
    weights = math.prod(weight)
    share = touched = 1.0
    lattices = (Lattice(0, 1, 0, 1),)
    if rule is not None and not rule.leaves_dense(*shape.output_size):
        phase = rule.draw_phase(None, seed=0)
        kept = rule.kept_positions(*shape.output_size, phase)
        if kept and (counts := rule.kept(gemm, weight, groups, *shape.output_size)):
            share = counts[0] / counts[1]
            lattices = () if rule.input_signs(phase) else kept
    if gemm != "grad_input" and lattices:
        touched = min(1.0, sum(_touched(shape, x) / x.parts for x in lattices))
    elements = {
        "input": shape.batch * shape.in_channels * shape.height * shape.width * touched,
        "weight": float(weights),
        "grad_output": float(shape.batch * shape.out_channels * positions),
    }
    moved = sum(elements.values()) * dtype.itemsize
    rate = rates.dense
    pattern = rule and rule.pattern(gemm)
    if accelerated and pattern:
        density = pattern.n / pattern.m
        saved = dtype.itemsize * (1 - density) - density * math.ceil(math.log2(pattern.m)) / 8
        moved -= elements[rule.operand] * saved
        rate = rates.sparse or rates.dense
    flops = 2.0 * shape.batch * positions * share * weights
    compute, memory = flops / rate, moved / rates.bandwidth
    limit = "compute" if compute >= memory else "memory"
    return Bound(flops, moved, max(compute, memory) * 1e3, limit)


def _touched(shape: LayerShape, lattice: Lattice) -> float:
    """Share of the input that the kernel sees from the lattice's positions."""
    steps = (lattice.row_step, lattice.column_step)
    axes = zip(shape.kernel, shape.geometry.stride, steps, strict=True)
    return math.prod(min(1.0, kernel / (stride * step)) for kernel, stride, step in axes)


def layer_bounds(
    layer: LayerTimes, strategies: Mapping[str, Strategy], dtype: torch.dtype, rates: Rates
) -> dict[str, dict[str, Bound]]:
    """GEMM -> contestant ("torch", strategies, names of timed alternatives) -> bound.

    Each with the backend that computes the GEMM.
    """
    bounds: dict[str, dict[str, Bound]] = {}
    for gemm in GEMMS:
        bound = functools.partial(gemm_bound, layer.shape, gemm, dtype, rates)
        bounds[gemm] = {PLAIN: bound()}
        chosen = {}
        for name, strategy in strategies.items():
            decision = layer.decisions.get(gemm, {}).get(name, {}).get(gemm)
            chosen[name] = decision and decision.backend
            accelerated = _is_accelerated(gemm, chosen[name])
            bounds[gemm][name] = bound(strategy, accelerated=accelerated)
        for other in layer.alternatives:
            if other.gemm == gemm and other.timing is not None:
                accelerated = _is_accelerated(gemm, other.forced.get(gemm, chosen[other.strategy]))
                strategy = strategies[other.strategy]
                bounds[gemm][other.name] = bound(strategy, accelerated=accelerated)
    return bounds


def _is_accelerated(gemm: str, name: str | None) -> bool:
    return name is not None and bool(backend(gemm, name).accelerated)
