"""grad_weight over kept output positions: the dense one with a larger stride (FST, Eq. 10).

Positions that are known before any value form a few regular lattices, and over a lattice the
sum  dW = Σ dY[kept] · X[kept]ᵀ  is the weight gradient of the same convolution with the stride
multiplied by the lattice's step, fed with what the rule's `fold` makes of grad_output: for FST,
dY[kept] + dY[dropped partner]. Half of the positions are half the work on any device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from fst.backends import dispatch
from fst.ops import centering, triton
from fst.ops.geometry import Geometry, gradients
from fst.ops.kept import KeptPositions, read, steps, window_start
from fst.ops.strided import PROGRAMS, Piece, programs
from fst.rules.rule import Lattice, Rule

REDUCED = Lattice(0, 1, 0, 1)  # the positions of what `_kept_input` leaves
KEEP_THEIR_RESULT = ("ReluBackward0", "SigmoidBackward0", "TanhBackward0")
VIEWS = ("PermuteBackward0", "TransposeBackward0", "ViewBackward0")


def keep(
    rule: Rule,
    phase: int,
    input: Tensor,
    weight: Tensor,
    output_size: tuple[int, int],
    geometry: Geometry,
) -> tuple[KeptPositions | None, list[Tensor]]:
    """The positions that ``rule`` keeps, if it knows them, and the inputs to save for grad_weight.

    For 1x1 convolutions only the kept part is saved, unless the operation that made ``input`` keeps
    the whole anyway, or the part that a recomputation keeps may be another one.
    """
    lattices = rule.kept_positions(*output_size, phase)
    if lattices is None:
        return None, [input]
    reduced = weight.shape[2:] == (1, 1) and not is_retained(input)
    reduced = reduced and not (rule.is_random and may_be_recomputed())
    input_size = (input.shape[2], input.shape[3])
    kept = KeptPositions(rule, phase, lattices, geometry, input_size, reduced)
    if not reduced:
        return kept, [input]
    inputs = _kept_input(input, kept, output_size)
    return kept, [*inputs, centering.mean(input)] if rule.centers else inputs


def is_retained(input: Tensor) -> bool:
    """Whether the operation that made ``input``, or what it is a view of, keeps it for its own
    backward pass.

    Not asked in compiled code, where the compiler decides what is saved.
    """
    maker = None if torch.compiler.is_compiling() else input.grad_fn
    while maker is not None and maker.name() in VIEWS:
        maker = maker.next_functions[0][0]
    return maker is not None and maker.name() in KEEP_THEIR_RESULT


def may_be_recomputed() -> bool:
    """Whether somebody packs what is saved, such as activation checkpointing.

    It calls the layer again in the backward pass and puts what that call saves in the place of
    what the first one saved, while the rest of the first call stays: its draw, for one. With a
    seed of its own the second call draws another.
    """
    if torch.compiler.is_compiling():
        return False
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None  # an older PyTorch does not say


def _kept_input(input: Tensor, kept: KeptPositions, size: tuple[int, int]) -> list[Tensor]:
    """What a 1x1 convolution's grad_weight reads of ``input``: one value for each kept position."""
    found = []
    for index in range(len(kept.lattices)):
        ((_, window, geometry),) = read(input, kept, index, size, (1, 1))
        (rows, columns), (top, left), _, _ = geometry
        window = F.pad(window, (left, left, top, top)) if top or left else window
        part = window[:, :, ::rows, ::columns]
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
    strided = geometry._replace(stride=steps(lattices[0], geometry))

    whole = kernel == (1, 1) and not kept.reduced  # what is kept of the input is yet to be taken

    def with_program(name: str, in_place: bool = False) -> Tensor:
        in_place |= not kept.reduced and (not whole or name == "product")
        # A candidate's time includes the fold, which is itself a choice.
        folded = fold_grad_output(grad_output, kept)
        needed = _kept_input(inputs[0], kept, size) if whole and not in_place else inputs
        total = _from_folded(name, folded, needed, weight, kept, size, in_place)
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


def _uncut(part: Tensor, input: Tensor, lattice: Lattice, geometry: Geometry) -> Piece:
    """A lattice of the whole image, for "gemm", which pads it once for all lattices."""
    start = (lattice.row * geometry.stride[0], lattice.column * geometry.stride[1])
    strided = geometry._replace(stride=steps(lattice, geometry))
    return Piece(part, lattice.samples(input), strided, start)


def _from_folded(
    program: str,
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
    kernel = (weight.shape[2], weight.shape[3])
    plain = Geometry((1, 1), (0, 0), (1, 1), kept.geometry.groups)
    # torch.compile cannot follow how many rows a piece has on maps of varying size.
    in_pieces = program == "strided" and kept.geometry.groups == 1
    in_pieces = in_pieces and not torch.compiler.is_compiling()
    pieces: list[Piece] = []
    edges: list[Piece] = []
    for index, part in enumerate(folded):
        if not part.numel():
            continue
        if not in_place:
            pieces.append(Piece(part, inputs[index], plain))
            continue
        if program == "gemm" and not kept.rule.input_signs(kept.phase):
            pieces.append(_uncut(part, inputs[0], kept.lattices[index], kept.geometry))
            continue
        views = read(inputs[0], kept, index, output_size, kernel, in_pieces=in_pieces)
        for rows, image, geometry in views:
            piece = Piece(part[:, :, rows] if len(views) > 1 else part, image, geometry)
            (edges if rows.start else pieces).append(piece)
    if not pieces:
        return weight.new_zeros(weight.shape, dtype=folded[0].dtype)
    total = PROGRAMS[program](pieces, weight)
    # an edge of a few rows is too little for the library's kernel
    return total.add_(PROGRAMS["gemm"](edges, weight)) if edges else total
