"""The operands of each operation, as backends take them: a class for each kind."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fst.backends.choice import Key, Operands, draw_seed, key_of
from fst.backends.record import Record
from fst.ops.geometry import Geometry, output_shape, positions_of
from fst.ops.positions import draw
from fst.ops.positions.lists import Lists
from fst.rules.rule import Lattice, Pattern, Rule
from fst.rules.sampled import Sampled
from fst.rules.strategy import Strategy

Gradients = tuple[Tensor | None, Tensor, Tensor | None]  # dX, dW, db
_OwnInput = TypeVar("_OwnInput", bound="GradInput")
_Own = TypeVar("_Own", bound="GradWeight")


class Zeros(NamedTuple):
    """Shares of zeros in the operands of a product, in eighths; 0 where they were not counted."""

    weight: float = 0.0
    input: float = 0.0
    grad_output: float = 0.0


@dataclass(slots=True)
class _Product(Operands):
    """Base class of the operands of products.

    Attributes:
        weight: (Cout, Cin/groups, kh, kw), as the product takes it; for dW only its shape and
            memory format count.
        zeros: of the operands that are multiplied.
    """

    weight: Tensor
    geometry: Geometry
    zeros: Zeros = field(default=Zeros(), kw_only=True)

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def is_all_zero(self) -> bool:
        return 1 in self.zeros

    @property
    def positions(self) -> int:
        """Output positions of the batch."""
        raise NotImplementedError

    @property
    def multiply_adds(self) -> int:
        """Those of the dense product."""
        return self.positions * self.weight.numel()


@dataclass(slots=True)
class Output(_Product):
    """Y = W·X + bias of a convolution.

    Attributes:
        input: (N, Cin, H, W).
        bias: (Cout,) or None.
    """

    operation = kind = "output"
    input: Tensor
    bias: Tensor | None

    @property
    def positions(self) -> int:
        samples, _, *size = output_shape(self.input.shape, self.weight.shape, self.geometry)
        return samples * math.prod(size)

    def key(self) -> Key:
        return key_of(
            *(self.input, self.weight), options=(self.bias is not None, *self.geometry.form)
        )

    def first_samples(self, count: int) -> tuple[Output, float]:
        some = self.input[:count]
        return replace(self, input=some), len(self.input) / len(some)


@dataclass(slots=True)
class _Backward(_Product):
    """Base class of the gradients' operands.

    Attributes:
        grad_output: (N, Cout, P, Q), pruned already.
    """

    grad_output: Tensor

    @property
    def positions(self) -> int:
        return positions_of(self.grad_output)


@dataclass(slots=True)
class GradInput(_Backward):
    """dX = Wᵀ·dY, over all positions.

    Attributes:
        input: (N, Cin, H, W) where it was saved for grad_weight anyway; only its shape counts.
    """

    operation = kind = "grad_input"
    input_shape: torch.Size
    input: Tensor | None = None

    def key(self) -> Key:
        options = (tuple(self.input_shape), *self.geometry.form)
        return key_of(self.grad_output, self.weight, options=options)

    def first_samples(self: _OwnInput, count: int) -> tuple[_OwnInput, float]:
        maps = self.grad_output[:count]
        shape = torch.Size((len(maps), *self.input_shape[1:]))
        input = None if self.input is None else self.input[:count]
        some = replace(self, grad_output=maps, input=input, input_shape=shape)
        return some, len(self.grad_output) / len(maps)


@dataclass(slots=True, kw_only=True)
class DrawnGradInput(GradInput):
    """dX = Wᵀ·dY over positions that a rule draws: exact in the mean.

    Attributes:
        lists: of drawn positions; one that grad_weight has drawn costs nothing here.
    """

    kind = "drawn_grad_input"
    rule: Sampled
    lists: Lists

    @property
    def kept(self) -> int:
        """The number of drawn positions."""
        return draw.count_of(self.rule.density, self.positions)

    def key(self) -> Key:
        own = (str(self.rule), self.kept, self.lists.is_drawn)
        tensors, options = GradInput.key(self)
        return tensors, (*own, *options)

    def without_draws(self) -> DrawnGradInput:
        return self if self.lists.is_drawn else replace(self, lists=self.lists.fresh())

    def first_samples(self, count: int) -> tuple[DrawnGradInput, float]:
        some, scale = GradInput.first_samples(self, count)
        lists = self.lists.part(len(some.grad_output))
        some = replace(some, lists=lists)
        if self.lists.is_drawn:
            lists.of(self.rule, some.kept)
        return some, scale


@dataclass(slots=True)
class GradWeight(_Backward):
    """dW = dY·Xᵀ, over all positions; the result is (dX or None, dW, db or None).

    Attributes:
        input: (N, Cin, H, W).
        joint: True where a dense dX of the same operands is wanted too: the library computes both
            in less time than one after the other.
        bias: True where the gradient of the bias is wanted too, if it costs nothing.
    """

    operation = kind = "grad_weight"
    input: Tensor
    joint: bool = False
    bias: bool = False

    def key(self) -> Key:
        options = (self.kind, self.joint, *self._options(), *self.geometry.form)
        return key_of(self.grad_output, self.input, self.weight, options=options)

    def _options(self) -> tuple[Any, ...]:
        return ()

    def first_samples(self: _Own, count: int) -> tuple[_Own, float]:
        # Half as many: the vectors of its kernels lie along the channels, not the images.
        count = -(-count // 2)
        maps = self.grad_output[:count]
        some = replace(self, grad_output=maps, input=self.input[:count])
        return some, len(self.grad_output) / len(maps)


@dataclass(slots=True, kw_only=True)
class DrawnGradWeight(GradWeight):
    """dW over positions that a rule draws: exact in the mean."""

    kind = "drawn_grad_weight"
    rule: Sampled
    lists: Lists

    @property
    def kept(self) -> int:
        """The number of drawn positions."""
        return draw.count_of(self.rule.density, self.positions)

    def _options(self) -> tuple[Any, ...]:
        return str(self.rule), self.kept

    def without_draws(self) -> DrawnGradWeight:
        return replace(self, lists=self.lists.fresh())

    def first_samples(self, count: int) -> tuple[DrawnGradWeight, float]:
        some, scale = GradWeight.first_samples(self, count)
        return replace(some, lists=self.lists.part(len(some.grad_output))), scale


@dataclass(slots=True, kw_only=True)
class FixedGradWeight(GradWeight):
    """dW over the fixed positions of a rule of the input, known before any value.

    Attributes:
        phase: which positions the rule keeps.
        lattices: these positions.
    """

    kind = "fixed_grad_weight"
    rule: Rule
    phase: int
    lattices: tuple[Lattice, ...]

    def _options(self) -> tuple[Any, ...]:
        return str(self.rule), self.phase


@dataclass(slots=True, kw_only=True)
class PrunedGradWeight(GradWeight):
    """dW from the input's columns im2col(X), which a rule prunes.

    Attributes:
        record: by whose times each call chooses the pruning's backend.
    """

    kind = "pruned_grad_weight"
    rule: Rule
    generator: torch.Generator | None
    record: Record

    @property
    def draws(self) -> bool:
        return self.rule.is_random

    def _options(self) -> tuple[Any, ...]:
        return (str(self.rule),)


@dataclass(slots=True)
class PruneWeight(Operands):
    """S(W) and S(Wᵀ) of a weight (Cout, Cin/groups, kh, kw), selected as it is stored, then cast to
    ``dtype``.

    Attributes:
        mask: replaces that of the output GEMM, where one is kept for several steps.
    """

    operation = kind = "prune_weight"
    weight: Tensor
    strategy: Strategy
    groups: int
    dtype: torch.dtype
    generator: torch.Generator | None = None
    mask: Tensor | None = None

    @property
    def draws(self) -> bool:
        rules = (self.strategy.output, self.strategy.grad_input)
        return any(r is not None and r.operand == "weight" and r.is_random for r in rules)

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def key(self) -> Key:
        options = (*self.strategy.weight_texts, self.groups, self.dtype, self.mask is None)
        return key_of(self.weight, options=options)


@dataclass(slots=True)
class PruneMaps(Operands):
    """N:M of grad_output (N, Cout, P, Q), along its channels or its positions; or of the columns
    im2col(X) (N, Cin·kh·kw, P·Q), along the positions.

    Attributes:
        pattern: N:M along the channels of ``maps``, or of ``across`` where that is given.
        across: ``maps`` with the positions as channels, (N, P·Q, channels, 1); else None.
        gemm: for which the rule prunes.
        memory: see `fst.Rule.prune_grad_output`.
    """

    operation = kind = "prune_grad_output"
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

    def key(self) -> Key:
        return key_of(self.maps, options=(*self.pattern, self.groups, self.across is None))


class PruneColumns(PruneMaps):
    """`PruneMaps` of the input's columns."""

    __slots__ = ()
    operation = kind = "prune_columns"
