"""The operands of each operation, as backends take them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fst.backends.choice import LayerKey, draw_seed
from fst.ops.geometry import Geometry, gradients, output_shape, positions_of
from fst.ops.positions import draw
from fst.ops.positions.lists import Lists
from fst.rules.rule import Lattice, Pattern, Rule
from fst.rules.sampled import samples
from fst.rules.strategy import Strategy

Gradients = tuple[Tensor | None, Tensor, Tensor | None]  # dX, dW, db


class Zeros(NamedTuple):
    """Shares of zeros in the operands of a product, in eighths; 0 where nobody has counted them."""

    weight: float = 0.0
    input: float = 0.0
    grad_output: float = 0.0


class Output(NamedTuple):
    """Y = W·X + bias of a convolution.

    Attributes:
        input: (N, Cin, H, W).
        weight: (Cout, Cin/groups, kh, kw), pruned already.
        bias: (Cout,) or None.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    geometry: Geometry
    zeros: Zeros = Zeros()

    @property
    def operation(self) -> str:
        return "output"

    @property
    def draws(self) -> bool:
        return False

    @property
    def device(self) -> torch.device:
        return self.input.device

    def key(self) -> LayerKey:
        options = (self.bias is not None, *self.geometry.form)
        zeros = (self.zeros.weight, self.zeros.input)
        return LayerKey.of(self.input, self.weight, options=options, zeros=zeros)

    def fresh(self) -> Output:
        return self

    def part(self, count: int) -> tuple[Output, float]:
        some = self.input[:count]
        return self._replace(input=some), len(self.input) / len(some)


class GradInput(NamedTuple):
    """dX = Wᵀ·dY.

    Attributes:
        grad_output: (N, Cout, P, Q), pruned already.
        weight: (Cout, Cin/groups, kh, kw), as this product multiplies with it.
        input: (N, Cin, H, W) where it was saved for grad_weight anyway; only its shape counts.
        rule: draws positions; None where all are taken.
        lists: of drawn positions; None without such a rule.
    """

    grad_output: Tensor
    weight: Tensor
    geometry: Geometry
    input_shape: torch.Size
    input: Tensor | None = None
    rule: Rule | None = None
    lists: Lists | None = None
    zeros: Zeros = Zeros()

    @property
    def operation(self) -> str:
        return "grad_input"

    @property
    def draws(self) -> bool:
        return False

    @property
    def device(self) -> torch.device:
        return self.grad_output.device

    @property
    def positions(self) -> int:
        """Output positions of the batch."""
        return positions_of(self.grad_output)

    @property
    def kept(self) -> int:
        """The positions that the rule draws; all of them without one."""
        return drawn_positions(self.rule, self.positions)

    def key(self) -> LayerKey:
        # A list that grad_weight has drawn is free here: the times are others than with a draw.
        is_drawn = self.lists is not None and self.lists.is_drawn
        rule = None if self.rule is None else str(self.rule)
        options = (rule, self.kept, is_drawn, tuple(self.input_shape), *self.geometry.form)
        zeros = (self.zeros.weight, self.zeros.grad_output)
        return LayerKey.of(self.grad_output, self.weight, options=options, zeros=zeros)

    def fresh(self) -> GradInput:
        if self.lists is None or self.lists.is_drawn:  # a list that grad_weight has drawn is free
            return self
        return self._replace(lists=self.lists.fresh())

    def part(self, count: int) -> tuple[GradInput, float]:
        maps = self.grad_output[:count]
        shape = torch.Size((len(maps), *self.input_shape[1:]))
        input = None if self.input is None else self.input[:count]
        lists = None if self.lists is None else self.lists.part(count)
        some = self._replace(grad_output=maps, input=input, input_shape=shape, lists=lists)
        if self.lists is not None and self.lists.is_drawn:
            assert lists is not None and samples(self.rule)
            lists.of(self.rule, some.kept)
        return some, len(self.grad_output) / len(maps)


class GradWeight(NamedTuple):
    """dW = dY·Xᵀ; the result is (dX or None, dW, db or None).

    Attributes:
        grad_output: (N, Cout, P, Q), pruned already.
        input: (N, Cin, H, W).
        weight: (Cout, Cin/groups, kh, kw), as grad_input multiplies with it; for dW only its shape
            and memory format count.
        rule: of drawn or fixed positions, or of pruned columns of the input; None: all positions.
        phase: which positions a rule of fixed ones keeps.
        lists: of drawn positions; None without such a rule.
        joint: True where a dense dX of the same operands is wanted too: the library computes both
            in less time than one after the other.
        bias: True where the gradient of the bias is wanted too, if it costs nothing.
    """

    grad_output: Tensor
    input: Tensor
    weight: Tensor
    geometry: Geometry
    rule: Rule | None = None
    phase: int = 0
    generator: torch.Generator | None = None
    lists: Lists | None = None
    joint: bool = False
    bias: bool = False
    zeros: Zeros = Zeros()

    @property
    def operation(self) -> str:
        return "grad_weight"

    @property
    def draws(self) -> bool:
        """True for random columns of the input; a drawn list is the same in every run."""
        prunes_columns = self.changes_result and self.lattices is None
        return prunes_columns and self.rule is not None and self.rule.is_random

    @property
    def device(self) -> torch.device:
        return self.grad_output.device

    @property
    def positions(self) -> int:
        """Output positions of the batch."""
        return positions_of(self.grad_output)

    @property
    def kept(self) -> int:
        """The positions that the rule draws; all of them without one."""
        return drawn_positions(self.rule if self.lists is not None else None, self.positions)

    @property
    def changes_result(self) -> bool:
        """True for a rule of the input, unless it keeps all positions of such an output map."""
        if self.rule is None or self.rule.operand != "input":
            return False
        if (lattices := self.lattices) is None:
            return True
        size = self.grad_output.shape[2:]
        return sum(math.prod(kept.size(*size)) for kept in lattices) < size.numel()

    @property
    def lattices(self) -> tuple[Lattice, ...] | None:
        """The fixed positions that the rule keeps; None for other rules."""
        if self.rule is None or self.rule.operand != "input":
            return None
        height, width = self.grad_output.shape[2:]
        return self.rule.kept_positions(height, width, self.phase)

    def key(self) -> LayerKey:
        rule = None if self.rule is None else str(self.rule)
        options = (rule, self.kept, self.phase, self.joint, *self.geometry.form)
        operands, zeros = (self.grad_output, self.input, self.weight), self.zeros[1:]
        return LayerKey.of(*operands, options=options, zeros=zeros)

    def with_grad_input(self, grad_weight: Tensor) -> Gradients:
        """A dW that was computed by itself, and the dense dX if it is wanted too.

        A backend of dW alone is so timed as it is used: beside the library's call for both.
        """
        if not self.joint:
            return None, grad_weight, None
        maps = (self.grad_output, self.input, self.weight)
        return gradients(*maps, self.geometry, (True, False, False))[0], grad_weight, None

    def fresh(self) -> GradWeight:
        return self if self.lists is None else self._replace(lists=self.lists.fresh())

    def part(self, count: int) -> tuple[GradWeight, float]:
        # Half as many: the vectors of its kernels lie along the channels, not the images.
        count = -(-count // 2)
        maps = self.grad_output[:count]
        lists = None if self.lists is None else self.lists.part(count)
        some = self._replace(grad_output=maps, input=self.input[:count], lists=lists)
        return some, len(self.grad_output) / len(maps)


def drawn_positions(rule: Rule | None, positions: int) -> int:
    """Return the number of positions that a rule draws; all of them without a rule."""
    return positions if rule is None else draw.count_of(rule.density, positions)


def multiply_adds(operands: Output | GradInput | GradWeight) -> int:
    """Those of the dense product."""
    if isinstance(operands, Output):
        positions = output_shape(operands.input.shape, operands.weight.shape, operands.geometry)
        return positions[0] * positions[2] * positions[3] * operands.weight.numel()
    return operands.positions * operands.weight.numel()


class PruneWeight(NamedTuple):
    """S(W) and S(Wᵀ) of a weight (Cout, Cin/groups, kh, kw), cast to ``dtype``.

    Attributes:
        mask: replaces that of the output GEMM, where one is kept for several steps.
    """

    weight: Tensor
    strategy: Strategy
    groups: int
    dtype: torch.dtype
    generator: torch.Generator | None = None
    mask: Tensor | None = None

    @property
    def operation(self) -> str:
        return "prune_weight"

    @property
    def rules(self) -> tuple[Rule | None, Rule | None]:
        return self.strategy.output, self.strategy.grad_input

    @property
    def draws(self) -> bool:
        return any(rule is not None and rule.is_random for rule in self.rules)

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def key(self) -> LayerKey:
        options = (*self.strategy.weight_texts, self.groups, self.dtype, self.mask is None)
        return LayerKey.of(self.weight, options=options)

    def fresh(self) -> PruneWeight:
        return self

    def part(self, count: int) -> tuple[PruneWeight, float]:
        return self, 1.0


class PruneMaps(NamedTuple):
    """N:M of grad_output (N, Cout, P, Q), along its channels or its positions; or of the columns
    im2col(X) (N, Cin·kh·kw, P·Q), along the positions.

    Attributes:
        operation: "prune_grad_output" or "prune_columns".
        pattern: N:M along the channels of ``maps``, or of ``across`` where that is given.
        across: ``maps`` with the positions as channels, (N, P·Q, channels, 1); else None.
        gemm: for which the rule prunes.
        memory: see `fst.Rule.prune_grad_output`.
    """

    operation: str
    maps: Tensor
    rule: Rule
    gemm: str
    groups: int
    generator: torch.Generator | None
    memory: dict[str, Any] | None
    pattern: Pattern
    across: Tensor | None = None

    @property
    def draws(self) -> bool:
        return self.rule.is_random

    @property
    def device(self) -> torch.device:
        return self.maps.device

    def seed(self) -> Tensor | None:
        """Return the seed of a kernel's draw; None for a rule that draws nothing."""
        return draw_seed(self.generator, self.maps.device) if self.draws else None

    def key(self) -> LayerKey:
        return LayerKey.of(self.maps, options=(*self.pattern, self.groups, self.across is None))

    def fresh(self) -> PruneMaps:
        return self

    def part(self, count: int) -> tuple[PruneMaps, float]:
        return self, 1.0
