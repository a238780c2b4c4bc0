"""grad_weight over kept output positions: the dense one with a larger stride (FST, Eq. 10).

Positions that are known before any value form one or two regular lattices, and over a lattice the
sum  dW = Σ dY[kept] · X[kept]ᵀ  is the weight gradient of the same convolution with the stride
multiplied by the lattice's step, fed with what the rule's `fold` makes of grad_output: for FST,
dY[kept] + dY[dropped partner]. It is half the work of the dense GEMM on any device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fst.backends import dispatch
from fst.ops import triton
from fst.ops.geometry import Geometry, gradients
from fst.ops.strided import PROGRAMS, programs
from fst.rules.rule import Lattice, Rule

REDUCED = Lattice(0, 1, 0, 1)  # the positions of what `_kept_input` leaves
KEEP_THEIR_RESULT = ("ReluBackward0", "SigmoidBackward0", "TanhBackward0")


class KeptPositions(NamedTuple):
    """What grad_weight must know of a call, besides its tensors.

    Attributes:
        phase: which of the rule's positions are kept.
        lattices: those positions.
        geometry: of the convolution.
        reduced: whether the saved inputs are those of the kept positions alone (1x1 kernels).
    """

    rule: Rule
    phase: int
    lattices: tuple[Lattice, ...]
    geometry: Geometry
    reduced: bool


def keep(
    rule: Rule,
    phase: int,
    input: Tensor,
    weight: Tensor,
    output_size: tuple[int, int],
    geometry: Geometry,
) -> tuple[KeptPositions | None, list[Tensor]]:
    """The positions that ``rule`` keeps, if it knows them, and the inputs to save for grad_weight.

    Of 1x1 convolutions only the kept part is saved, unless the operation that made ``input`` keeps
    the whole anyway.
    """
    lattices = rule.kept_positions(*output_size, phase)
    if lattices is None:
        return None, [input]
    reduced = weight.shape[2:] == (1, 1) and not is_retained(input)
    inputs = _kept_input(input, lattices, output_size, geometry) if reduced else [input]
    return KeptPositions(rule, phase, lattices, geometry, reduced), inputs


def is_retained(input: Tensor) -> bool:
    """Whether the operation that made ``input`` keeps it for its own backward pass.

    Not asked in compiled code, where the compiler decides what is saved.
    """
    maker = None if torch.compiler.is_compiling() else input.grad_fn
    return maker is not None and maker.name() in KEEP_THEIR_RESULT


def _kept_input(
    input: Tensor, lattices: tuple[Lattice, ...], size: tuple[int, int], geometry: Geometry
) -> list[Tensor]:
    """What a 1x1 convolution's grad_weight reads of ``input``: one value for each kept position."""
    return [
        _window(input, p, size, (1, 1), geometry)[
            :, :, :: p.row_step * geometry.stride[0], :: p.column_step * geometry.stride[1]
        ].clone(memory_format=torch.preserve_format)
        for p in lattices
    ]


def fold_grad_output(grad_output: Tensor, kept: KeptPositions) -> list[Tensor]:
    """grad_output (N, Cout, P, Q) at each lattice, with what the rule adds to it."""
    block, lattices = kept.rule.summed_block, kept.lattices
    if block == (1, 1):
        return kept.rule.fold(grad_output, lattices, kept.phase)
    candidates = {"torch": lambda: kept.rule.fold(grad_output, lattices, kept.phase)}
    if block is not None and triton.takes(grad_output.dtype):
        numbers = [number for lattice in lattices for number in lattice]
        candidates["triton"] = lambda: triton.fold_grad_output(grad_output, block, numbers)
    return dispatch.run("fold_grad_output", candidates, (grad_output,), (block, lattices))


def grad_weight(
    grad_output: Tensor, inputs: list[Tensor], weight: Tensor, kept: KeptPositions
) -> Tensor:
    """dW (Cout, Cin/groups, kh, kw) from grad_output (N, Cout, P, Q).

    ``inputs`` are what `keep` saved; of ``weight`` only the shape and the memory format count.
    """
    rule, lattices, geometry = kept.rule, kept.lattices, kept.geometry
    kernel = (weight.shape[2], weight.shape[3])
    size = (grad_output.shape[2], grad_output.shape[3])
    strided = geometry._replace(stride=_steps(lattices[0], geometry))

    def with_program(name: str) -> Tensor:
        # A candidate's time includes the fold, which is itself a choice.
        folded = fold_grad_output(grad_output, kept)
        needed = inputs
        if kernel == (1, 1) and not kept.reduced:
            needed = _kept_input(inputs[0], lattices, size, geometry)
        return _from_folded(PROGRAMS[name], folded, needed, weight, kept, size)

    candidates = {
        name: functools.partial(with_program, name)
        for name in programs(grad_output, kernel, strided)
    }
    if not kept.reduced:

        def masked() -> Tensor:
            spread = torch.zeros_like(grad_output)
            for lattice, part in zip(lattices, fold_grad_output(grad_output, kept), strict=True):
                lattice.of(spread).copy_(part)
            return gradients(spread, inputs[0], weight, geometry, (False, True, False))[1]

        candidates["masked"] = masked
    block = rule.summed_block
    if block is not None and triton.takes(grad_output.dtype):
        windows = [REDUCED if kept.reduced else window_start(p, geometry) for p in lattices]
        each = inputs if kept.reduced else inputs * len(lattices)
        candidates["triton"] = lambda: triton.grad_weight(
            grad_output,
            each,
            weight,
            block,
            block != (1, 1),
            [number for lattice in lattices for number in lattice],
            [number for window in windows for number in window],
            geometry.dilation,
            geometry.groups,
        )
    tensors, options = (grad_output, *inputs, weight), (block, lattices, geometry)
    return dispatch.run("grad_weight", candidates, tensors, options)


def _from_folded(
    program: Callable[[Tensor, Tensor, Tensor, Geometry], Tensor],
    folded: list[Tensor],
    inputs: list[Tensor],
    weight: Tensor,
    kept: KeptPositions,
    output_size: tuple[int, int],
) -> Tensor:
    """The sum over lattices of the strided weight gradients that ``program`` computes."""
    geometry, kernel = kept.geometry, (weight.shape[2], weight.shape[3])
    total: Tensor | None = None
    for index, (lattice, part) in enumerate(zip(kept.lattices, folded, strict=True)):
        if kernel == (1, 1):
            window, strided = inputs[index], Geometry((1, 1), (0, 0), (1, 1), geometry.groups)
        else:
            window, strided = _strided(inputs[0], lattice, output_size, kernel, geometry)
        gradient = program(part, window, weight, strided)
        total = gradient if total is None else total + gradient
    return total


def _steps(lattice: Lattice, geometry: Geometry) -> tuple[int, int]:
    """Rows and columns of the input from one kept position to the next."""
    return geometry.stride[0] * lattice.row_step, geometry.stride[1] * lattice.column_step


def window_start(lattice: Lattice, geometry: Geometry) -> Lattice:
    """Where in the input the window of each kept position begins; in the padding below 0."""
    rows, columns = _steps(lattice, geometry)
    return Lattice(
        lattice.row * geometry.stride[0] - geometry.padding[0],
        rows,
        lattice.column * geometry.stride[1] - geometry.padding[1],
        columns,
    )


def _strided(
    input: Tensor,
    lattice: Lattice,
    output_size: tuple[int, int],
    kernel: tuple[int, int],
    geometry: Geometry,
) -> tuple[Tensor, Geometry]:
    stride = _steps(lattice, geometry)
    if (lattice.row, lattice.column) == (0, 0):
        return input, geometry._replace(stride=stride)
    window = _window(input, lattice, output_size, kernel, geometry)
    return window, geometry._replace(stride=stride, padding=(0, 0))


def _window(
    input: Tensor,
    lattice: Lattice,
    output_size: tuple[int, int],
    kernel: tuple[int, int],
    geometry: Geometry,
) -> Tensor:
    """The part of the padded input that the lattice's positions see."""
    edges: list[int] = []
    starts = ((lattice.row, lattice.row_step), (lattice.column, lattice.column_step))
    for axis, (start, step) in enumerate(starts):
        last = start + (output_size[axis] - 1 - start) // step * step
        stride, padding = geometry.stride[axis], geometry.padding[axis]
        begin = start * stride - padding
        end = last * stride - padding + geometry.dilation[axis] * (kernel[axis] - 1) + 1
        edges = [-begin, end - input.shape[2 + axis], *edges]
    # Padded before it is cut: a window may lie wholly in the padding.
    for part in ([max(edge, 0) for edge in edges], [min(edge, 0) for edge in edges]):
        input = F.pad(input, part) if any(part) else input
    return input
