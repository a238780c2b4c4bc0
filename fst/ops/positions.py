"""grad_weight over kept output positions: the dense one with a larger stride (FST, Eq. 10).

Positions that are known before any value form one or two regular lattices, and over a lattice the
sum  dW = Σ dY[kept] · X[kept]ᵀ  is the weight gradient of the same convolution with the stride
multiplied by the lattice's step, fed with what the rule's `fold` makes of grad_output: for FST,
dY[kept] + dY[dropped partner]. It is half the work of the dense GEMM on any device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fst.backends import dispatch
from fst.ops import centering, triton
from fst.ops.geometry import Geometry, gradients
from fst.ops.strided import PROGRAMS, programs
from fst.rules.rule import Lattice, Rule, Signs

REDUCED = Lattice(0, 1, 0, 1)  # the positions of what `_kept_input` leaves
KEEP_THEIR_RESULT = ("ReluBackward0", "SigmoidBackward0", "TanhBackward0")


class KeptPositions(NamedTuple):
    """What grad_weight must know of a call, besides its tensors.

    Attributes:
        phase: which of the rule's positions are kept.
        lattices: those positions.
        geometry: of the convolution.
        input_size: rows and columns of the whole input.
        reduced: whether the saved inputs are those of the kept positions alone (1x1 kernels).
    """

    rule: Rule
    phase: int
    lattices: tuple[Lattice, ...]
    geometry: Geometry
    input_size: tuple[int, int]
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
    input_size = (input.shape[2], input.shape[3])
    kept = KeptPositions(rule, phase, lattices, geometry, input_size, reduced)
    if not reduced:
        return kept, [input]
    inputs = _kept_input(input, kept, output_size)
    return kept, [*inputs, centering.mean(input)] if rule.centers else inputs


def is_retained(input: Tensor) -> bool:
    """Whether the operation that made ``input`` keeps it for its own backward pass.

    Not asked in compiled code, where the compiler decides what is saved.
    """
    maker = None if torch.compiler.is_compiling() else input.grad_fn
    return maker is not None and maker.name() in KEEP_THEIR_RESULT


def _kept_input(input: Tensor, kept: KeptPositions, size: tuple[int, int]) -> list[Tensor]:
    """What a 1x1 convolution's grad_weight reads of ``input``: one value for each kept position."""
    found = []
    for index in range(len(kept.lattices)):
        window, (steps, (top, left), _, _) = _read(input, kept, index, size, (1, 1))
        window = F.pad(window, (left, left, top, top)) if top or left else window
        part = window[:, :, :: steps[0], :: steps[1]]
        found.append(part.clone(memory_format=torch.preserve_format))
    return found


def fold_grad_output(grad_output: Tensor, kept: KeptPositions) -> list[Tensor]:
    """grad_output (N, Cout, P, Q) at each lattice, with what the rule adds to it."""
    block, lattices = kept.rule.summed_block, kept.lattices
    if block is None or block == (1, 1):
        return kept.rule.fold(grad_output, lattices, kept.phase)
    candidates = {"torch": lambda: kept.rule.fold(grad_output, lattices, kept.phase)}
    if triton.takes_block(block) and triton.takes(grad_output.dtype):
        candidates["triton"] = lambda: triton.fold_grad_output(grad_output, block, _flat(lattices))
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

    whole = kernel == (1, 1) and not kept.reduced  # what is kept of the input is yet to be taken

    def with_program(name: str, in_place: bool = not (whole or kept.reduced)) -> Tensor:
        # A candidate's time includes the fold, which is itself a choice.
        folded = fold_grad_output(grad_output, kept)
        needed = _kept_input(inputs[0], kept, size) if whole and not in_place else inputs
        total = _from_folded(PROGRAMS[name], folded, needed, weight, kept, size, in_place)
        return _completed(total, grad_output, inputs, kept)

    candidates = {
        name: functools.partial(with_program, name)
        for name in programs(grad_output, weight, strided)
    }
    if whole:
        candidates["in_place"] = functools.partial(with_program, "strided", in_place=True)
    if not kept.reduced and not rule.input_signs(kept.phase):

        def masked() -> Tensor:
            spread = torch.zeros_like(grad_output)
            for lattice, part in zip(lattices, fold_grad_output(grad_output, kept), strict=True):
                lattice.of(spread).copy_(part)
            needed = (False, True, False)
            total = gradients(spread, inputs[0], weight, geometry, needed)[1]
            return _completed(total, grad_output, inputs, kept)

        candidates["masked"] = masked
    block = rule.summed_block
    if triton.takes_block(block) and triton.takes(grad_output.dtype):
        windows = [REDUCED if kept.reduced else window_start(p, geometry) for p in lattices]
        each = inputs if kept.reduced else inputs * len(lattices)
        candidates["triton"] = lambda: triton.grad_weight(
            grad_output,
            each,
            weight,
            block,
            block != (1, 1),
            _flat(lattices),
            _flat(windows),
            geometry.dilation,
            geometry.groups,
        )
    tensors, options = (grad_output, *inputs, weight), (str(rule), lattices, geometry)
    return dispatch.run("grad_weight", candidates, tensors, options)


def _flat(lattices: Iterable[Lattice]) -> list[int]:
    return [number for lattice in lattices for number in lattice[:4]]


def _completed(
    total: Tensor, grad_output: Tensor, inputs: list[Tensor], kept: KeptPositions
) -> Tensor:
    """The sum over the kept positions with the rule's factor, and with the mean's share."""
    rule = kept.rule
    if not rule.centers:
        return total if rule.scale == 1 else total * rule.scale
    mean = inputs[-1] if kept.reduced else centering.mean(inputs[0])
    return centering.with_share_of_mean(total, grad_output, mean, kept)


def _from_folded(
    program: Callable[..., Tensor],
    folded: list[Tensor],
    inputs: list[Tensor],
    weight: Tensor,
    kept: KeptPositions,
    output_size: tuple[int, int],
    in_place: bool,
) -> Tensor:
    """The sum over lattices of the strided weight gradients that ``program`` computes.

    ``in_place``: from the whole input, not from what `_kept_input` took for each lattice.
    """
    geometry, kernel = kept.geometry, (weight.shape[2], weight.shape[3])
    total: Tensor | None = None
    for index, part in enumerate(folded):
        if not part.numel():
            continue
        if not in_place:
            window, strided = inputs[index], Geometry((1, 1), (0, 0), (1, 1), geometry.groups)
        else:
            window, strided = _read(inputs[0], kept, index, output_size, kernel)
        gradient = program(part, window, weight, strided)
        total = gradient if total is None else total + gradient
    return weight.new_zeros(weight.shape, dtype=folded[0].dtype) if total is None else total


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


def _read(
    input: Tensor,
    kept: KeptPositions,
    index: int,
    output_size: tuple[int, int],
    kernel: tuple[int, int],
) -> tuple[Tensor, Geometry]:
    """What the positions of a lattice see of the input, and the convolution that reads it."""
    lattice, geometry = kept.lattices[index], kept.geometry
    input, signs = lattice.samples(input), kept.rule.input_signs(kept.phase)
    strided = geometry._replace(stride=_steps(lattice, geometry))
    if not signs:
        return _windows(input, lattice, output_size, kernel, strided, geometry, (1, 1))
    block = (len(signs[index]), len(signs[index][0]))
    whole, strided = _windows(input, lattice, output_size, kernel, strided, geometry, block)
    return _filtered(whole, signs[index], geometry.stride), strided


def _windows(
    input: Tensor,
    lattice: Lattice,
    output_size: tuple[int, int],
    kernel: tuple[int, int],
    strided: Geometry,
    geometry: Geometry,
    block: tuple[int, int],
) -> tuple[Tensor, Geometry]:
    """The part of the padded input that the lattice's positions see, each a block of windows.

    Along an axis where the first window is the convolution's first, its padding stays.
    """
    padding = list(geometry.padding)
    edges: list[int] = []
    starts = ((lattice.row, lattice.row_step), (lattice.column, lattice.column_step))
    for axis, (start, step) in enumerate(starts):
        stride, pad = geometry.stride[axis], padding[axis]
        outside = (0, 0)
        if start or block[axis] > 1:
            padding[axis] = 0
            last = start + (output_size[axis] - 1 - start) // step * step
            begin = start * stride - pad
            reach = geometry.dilation[axis] * (kernel[axis] - 1) + (block[axis] - 1) * stride
            input, outside = _cut(input, 2 + axis, begin, last * stride - pad + reach + 1)
        edges = [*outside, *edges]
    if any(edges):
        input = F.pad(input, edges)
    return input, strided._replace(padding=(padding[0], padding[1]))


def _cut(input: Tensor, axis: int, begin: int, end: int) -> tuple[Tensor, tuple[int, int]]:
    """``input`` from ``begin`` to ``end``, which may lie outside: then zeros are to be padded."""
    size = input.shape[axis]
    first, last = min(max(begin, 0), size), min(max(end, 0), size)
    if last <= first:  # wholly in the padding
        return input.narrow(axis, 0, 0), (0, max(end - begin, 0))
    return input.narrow(axis, first, last - first), (first - begin, end - last)


def _filtered(windows: Tensor, signs: Signs, stride: tuple[int, int]) -> Tensor:
    """Σ ±X over a block of windows, which are ``stride`` apart."""
    rows = windows.shape[2] - (len(signs) - 1) * stride[0]
    columns = windows.shape[3] - (len(signs[0]) - 1) * stride[1]
    total: Tensor | None = None
    for i, line in enumerate(signs):
        strip = windows.narrow(2, i * stride[0], rows)
        for j, sign in enumerate(line):
            part = strip.narrow(3, j * stride[1], columns)
            if total is None:  # the first sign is always +
                total = part.clone(memory_format=torch.preserve_format)
            else:
                total = total.add_(part, alpha=sign)
    return total
