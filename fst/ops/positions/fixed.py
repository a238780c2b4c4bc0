"""FST's Eq. 10: dW over every other output position, with pair sums of dY."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from fst.backends import dispatch
from fst.ops import cpp
from fst.ops.geometry import Geometry
from fst.ops.positions import draw, native, products, strided
from fst.rules.rule import Lattice, Rule

FEW_CHANNELS = 8  # of the input, below which the C++ kernel's tiles are mostly empty


def grad_weight(
    grad_output: Tensor, input: Tensor, weight: Tensor, geometry: Geometry, rule: Rule, phase: int
) -> Tensor:
    """dW (Cout, Cin/groups, kh, kw) over the positions that ``rule`` keeps.

    Args:
        grad_output: (N, Cout, P, Q).
        input: (N, Cin, H, W).
        weight: only its shape and memory format count.
        phase: which of the rule's positions.
    """
    size = (grad_output.shape[2], grad_output.shape[3])
    lattices = rule.kept_positions(*size, phase)
    assert lattices is not None  # the rule knows its positions

    def summed(multiply: Callable[[Tensor, Lattice], Tensor]) -> Tensor:
        kept = rule.summed(grad_output, lattices, phase)
        parts = [multiply(f, p) for f, p in zip(kept, lattices, strict=True) if f.numel()]
        if not parts:
            return weight.new_zeros(weight.shape, dtype=grad_output.dtype)
        return functools.reduce(Tensor.add_, parts)

    def by_list(sums: Tensor, lattice: Lattice, product: Callable[..., Tensor]) -> Tensor:
        listed = draw.fixed(lattice, len(input), size, input.device)
        if rule.summed_block == (1, 1):
            sums, listed = grad_output, listed._replace(source=None)
        return product(sums, input, weight, listed, geometry)

    def by_stride(sums: Tensor, lattice: Lattice) -> Tensor:
        return strided.grad_weight(sums, input, weight, lattice, size, geometry)

    candidates = {
        "strided": lambda: summed(by_stride),
        "torch": lambda: summed(functools.partial(by_list, product=products.grad_weight)),
    }
    if cpp.takes_lists(grad_output, input):
        with_cpp = functools.partial(by_list, product=native.grad_weight)
        listed = {cpp.BACKEND: lambda: summed(with_cpp)}
        is_wide = weight.shape[1] >= FEW_CHANNELS
        candidates = listed | candidates if is_wide else candidates | listed
    tensors, options = (grad_output, input, weight), (str(rule), lattices, geometry)
    return dispatch.compute("grad_weight", candidates, tensors, options)
