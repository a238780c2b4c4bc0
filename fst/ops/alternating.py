"""The half-cost grad_weight of FST (Eq. 7 and 10): a dense weight gradient with doubled stride.

With a fixed mask the kept output positions are known. They form one or two regular lattices, and
over a lattice the sum  dW = Σ (dY[kept] + dY[dropped partner]) · X[kept]ᵀ  is the weight gradient
of the same convolution with the stride multiplied by the lattice's step, fed with the folded
grad_output. It is half the work of the dense GEMM (a quarter for 2x2 blocks) on any device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fst.backends import dispatch
from fst.ops import triton as ops
from fst.ops.geometry import Geometry, gradients
from fst.ops.strided import PROGRAMS, programs
from fst.rules.alternating import Alternating


class Lattice(NamedTuple):
    """Output positions (row + i * row_step, column + j * column_step)."""

    row: int
    row_step: int
    column: int
    column_step: int


REDUCED = Lattice(0, 1, 0, 1)  # the positions of what `kept_input` leaves
KEEP_THEIR_RESULT = ("ReluBackward0", "SigmoidBackward0", "TanhBackward0")


def lattices(rule: Alternating, phase: int, height: int, width: int) -> tuple[Lattice, ...]:
    """The kept positions of a height x width output map."""
    if rule.block == (2, 2):
        return (Lattice(0, 2, 0, 2),)
    if rule.pairing == "row" or width % 2 == 0:
        return (Lattice(0, 1, phase if width > 1 else 0, 2),)
    # Pairs along the flattened map of odd width: the phase flips from row to row.
    if height * width == 1:
        phase = 0
    found = (Lattice(0, 2, phase, 2), Lattice(1, 2, 1 - phase, 2))
    return tuple(p for p in found if p.row < height and p.column < width)


def fold_grad_output(
    grad_output: Tensor, rule: Alternating, phase: int, kept: tuple[Lattice, ...]
) -> list[Tensor]:
    """grad_output (N, Cout, P, Q) at the kept positions, with that of the dropped ones added."""
    if not rule.restore:
        return [grad_output[:, :, p.row :: p.row_step, p.column :: p.column_step] for p in kept]
    candidates = {"torch": lambda: _fold(grad_output, rule, phase, kept)}
    if ops.takes(grad_output.dtype):
        numbers = [number for lattice in kept for number in lattice]
        candidates["triton"] = lambda: ops.fold_grad_output(grad_output, rule.block, numbers)
    return dispatch.run("fold_grad_output", candidates, (grad_output,), (rule.block, kept))


def _fold(
    grad_output: Tensor, rule: Alternating, phase: int, kept: tuple[Lattice, ...]
) -> list[Tensor]:
    height, width = grad_output.shape[2:]
    if rule.pairing == "row" or width % 2 == 0:
        return [_fold_blocks(grad_output, rule.block, kept[0].column)]
    flat = grad_output.flatten(2)
    restored = flat.clone(memory_format=torch.preserve_format)
    if phase == 0:
        restored[:, :, :-1] += flat[:, :, 1:]
    else:
        restored[:, :, 1:] += flat[:, :, :-1]
        if (height * width) % 2 and height * width > 1:
            restored[:, :, -2] += flat[:, :, -1]
    restored = restored.unflatten(2, (height, width))
    return [restored[:, :, p.row :: p.row_step, p.column :: p.column_step] for p in kept]


def _fold_blocks(grad_output: Tensor, block: tuple[int, int], phase: int) -> Tensor:
    """Sum over blocks; a last row or column of an odd size stands alone (phase 0) or joins the
    last block (phase 1).
    """
    width = grad_output.shape[3]
    if phase == 0 or width % 2 == 0:
        return _sum_pool(grad_output, block)
    folded = _sum_pool(grad_output[..., :-1], block)
    folded[..., -1] += grad_output[..., -1]
    return folded


def _sum_pool(tensor: Tensor, block: tuple[int, int]) -> Tensor:
    return F.avg_pool2d(tensor, block, ceil_mode=True, divisor_override=1)


def kept_input(
    input: Tensor, kept: tuple[Lattice, ...], output_size: tuple[int, int], geometry: Geometry
) -> list[Tensor]:
    """What a 1x1 convolution's grad_weight reads of ``input``: one value for each kept position."""
    return [
        _window(input, p, output_size, (1, 1), geometry)[
            :, :, :: p.row_step * geometry.stride[0], :: p.column_step * geometry.stride[1]
        ].clone(memory_format=torch.preserve_format)
        for p in kept
    ]


def is_retained(input: Tensor) -> bool:
    """Whether the operation that made ``input`` keeps it for its own backward pass.

    Not asked in compiled code, where the compiler decides what is saved.
    """
    maker = None if torch.compiler.is_compiling() else input.grad_fn
    return maker is not None and maker.name() in KEEP_THEIR_RESULT


def grad_weight(
    grad_output: Tensor,
    inputs: list[Tensor],
    weight: Tensor,
    rule: Alternating,
    phase: int,
    kept: tuple[Lattice, ...],
    geometry: Geometry,
    *,
    reduced: bool,
) -> Tensor:
    """dW (Cout, Cin/groups, kh, kw) from grad_output (N, Cout, P, Q).

    ``inputs`` is the whole input once, or where ``reduced`` what `kept_input` left of it; of
    ``weight`` only the shape and the memory format count.
    """
    kernel = (weight.shape[2], weight.shape[3])
    size = (grad_output.shape[2], grad_output.shape[3])
    strided = geometry._replace(stride=_steps(kept[0], geometry))

    def with_program(name: str) -> Tensor:
        folded = fold_grad_output(grad_output, rule, phase, kept)
        needed = inputs
        if kernel == (1, 1) and not reduced:
            needed = kept_input(inputs[0], kept, size, geometry)
        return _from_folded(PROGRAMS[name], folded, needed, weight, kept, size, geometry)

    candidates = {
        name: functools.partial(with_program, name)
        for name in programs(grad_output, kernel, strided)
    }
    if not reduced:

        def masked() -> Tensor:
            folded = fold_grad_output(grad_output, rule, phase, kept)
            spread = _spread(folded, grad_output, kept)
            return gradients(spread, inputs[0], weight, geometry, (False, True, False))[1]

        candidates["masked"] = masked
    if ops.takes(grad_output.dtype):
        windows = [REDUCED if reduced else window_start(p, geometry) for p in kept]
        each = inputs if reduced else inputs * len(kept)
        candidates["triton"] = lambda: ops.grad_weight(
            grad_output,
            each,
            weight,
            rule.block,
            rule.restore,
            [number for lattice in kept for number in lattice],
            [number for window in windows for number in window],
            geometry.dilation,
            geometry.groups,
        )
    tensors, options = (grad_output, *inputs, weight), (rule.block, rule.restore, kept, geometry)
    return dispatch.run("grad_weight", candidates, tensors, options)


def _spread(folded: list[Tensor], grad_output: Tensor, kept: tuple[Lattice, ...]) -> Tensor:
    """The folded grad_output at its kept positions, zeros elsewhere."""
    spread = torch.zeros_like(grad_output)
    for p, part in zip(kept, folded, strict=True):
        spread[:, :, p.row :: p.row_step, p.column :: p.column_step] = part
    return spread


def _from_folded(
    program: Callable[[Tensor, Tensor, Tensor, Geometry], Tensor],
    folded: list[Tensor],
    inputs: list[Tensor],
    weight: Tensor,
    kept: tuple[Lattice, ...],
    output_size: tuple[int, int],
    geometry: Geometry,
) -> Tensor:
    """The sum over lattices of the strided weight gradients that ``program`` computes."""
    kernel = (weight.shape[2], weight.shape[3])
    total: Tensor | None = None
    for index, (lattice, part) in enumerate(zip(kept, folded, strict=True)):
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
    return F.pad(input, edges) if any(edges) else input
