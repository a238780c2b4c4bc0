"""Rules of the weight that choose a mask and change values too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from fst.basics.values import check_number
from fst.rules import masks
from fst.rules.nm import NM
from fst.rules.rule import Pattern, WeightGroups

SHARPNESS = 0.01  # of MaxQ's sigmoid, in units of the weight


@dataclass(frozen=True)
class _Valued(NM):
    """N:M by magnitude in output, with values of its own."""

    operand: str = "weight"
    operands, rules = ("weight",), ("magnitude",)
    changes_values = True

    def pattern(self, gemm: str) -> Pattern | None:
        return None

    def _in_groups(self, tensor: Tensor) -> Tensor:
        """(Cout, Cin/groups, kh, kw) as (groups of m, m), padded with zeros."""
        if self.group_order == "channel":
            tensor = tensor.movedim(1, -1)
        flat = tensor.reshape(len(tensor), -1, tensor.shape[-1])
        if self.group_order == "im2col":
            flat = tensor.flatten(1)[:, None]
        return F.pad(flat, (0, -flat.shape[-1] % self.m)).unflatten(-1, (-1, self.m))

    def _for_groups(self, values: Tensor, shape: Sequence[int]) -> Tensor:
        """A value of each of `_in_groups`, (..., groups), at the weight's elements."""
        outputs, inputs, height, width = shape
        each = values.repeat_interleave(self.m, -1)
        if self.group_order == "im2col":
            return each[..., : inputs * height * width].reshape(tuple(shape))
        return each[..., :inputs].reshape(outputs, height, width, inputs).movedim(-1, 1)


@dataclass(frozen=True)
class SoftThreshold(_Valued):
    """Keep the n largest of m, less the magnitude of the next one (S-STE, Hu et al. 2024).

    sign(a)(|a| − t) for each kept a, t being the (n + 1)-th magnitude of its group, times a factor
    of the whole weight. The result is continuous in the weight.

    Attributes:
        factor: β, a scalar tensor; None: ⟨W, S⟩ / ⟨S, S⟩ of the weight at hand, which keeps its
            scale.
    """

    factor: Tensor | None = field(default=None, compare=False)

    def weight_values(self, weight: Tensor, mask: Tensor, groups: int) -> Tensor:
        factor = self.factor_of(weight, mask) if self.factor is None else self.factor
        return self._soft(weight, mask) * factor.to(weight)

    def _soft(self, weight: Tensor, mask: Tensor) -> Tensor:
        thresholds = self._in_groups(masks.remove_kept(weight, mask).abs()).amax(-1)
        less = weight.abs() - self._for_groups(thresholds, weight.shape)
        return masks.apply_mask(weight.sign() * less, mask)

    def factor_of(self, weight: Tensor, mask: Tensor) -> Tensor:
        """β of this weight, (), at least in float32; 1 where nothing is left of it."""
        soft = masks.widened(self._soft(weight, mask))
        squares = soft.square().sum()
        return torch.where(squares > 0, (masks.widened(weight) * soft).sum() / squares, 1.0)

    def __str__(self) -> str:
        return f"{super().__str__()}, soft threshold"


@dataclass(frozen=True)
class Fading(_Valued):
    """The n largest of m, and the others times ``rest`` (MdGf, Bambhaniya et al. 2024).

    Attributes:
        rest: γ, from 1 (dense) to 0 (N:M).
    """

    rest: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("rest", self.rest, "[0, 1]")

    def weight_values(self, weight: Tensor, mask: Tensor, groups: int) -> Tensor:
        return masks.apply_mask(weight, mask) + masks.remove_kept(weight, mask) * self.rest

    @property
    def weight_groups(self) -> WeightGroups | None:
        return super().weight_groups if self.rest == 0 else None

    def __str__(self) -> str:
        rest = f", the others times {self.rest:.4g}" if self.rest else ""
        return f"{super().__str__()}{rest}"


@dataclass(frozen=True)
class MultiAxis(_Valued):
    """N:M, with larger factors for weights that matter along other axes (MaxQ, Xiang et al. 2024).

    W∘M∘(1 + F + P). F compares the weights of a filter: the share (m − n)/m of smallest magnitude
    has 0, another w has σ((|w| − τ)/0.01), τ being the mean of the two magnitudes at the cut. P is
    the same for the weights at each place of the kernel, and 0 for 1x1 kernels.

    Attributes:
        dense_groups: share of the layer's groups, those of smallest L1 norm, that stay dense.
    """

    dense_groups: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("dense_groups", self.dense_groups, "[0, 1]")

    def weight_mask(
        self, weight: Tensor, gemm: str, groups: int, generator: torch.Generator | None = None
    ) -> Tensor:
        mask = super().weight_mask(weight, gemm, groups, generator)
        norms = self._in_groups(weight.abs()).sum(-1)
        count = int(self.dense_groups * norms.numel())
        if not count:
            return mask
        return mask | self._for_groups(masks.largest_mask(-norms, count), weight.shape)

    def weight_values(self, weight: Tensor, mask: Tensor, groups: int) -> Tensor:
        if self.n == self.m:
            return weight.clone()
        magnitude = weight.abs()
        factors = 1 + self._importance(magnitude.flatten(1)).view(weight.shape)
        if weight.shape[2:].numel() > 1:
            places = self._importance(magnitude.flatten(2).flatten(0, 1).T)
            factors = factors + places.T.reshape(weight.shape)
        return masks.apply_mask(weight * factors, mask)

    def _importance(self, rows: Tensor) -> Tensor:
        """F or P of (rows, magnitudes that are compared)."""
        cut = int((self.m - self.n) / self.m * rows.shape[1])
        order = rows.sort(dim=1, descending=True, stable=True)
        left = rows.shape[1] - cut
        threshold = order.values[:, max(0, left - 1) : left + 1].mean(1, keepdim=True)
        found = torch.sigmoid((rows - threshold) / SHARPNESS)
        return found.scatter(1, order.indices[:, left:], 0)

    @property
    def weight_groups(self) -> WeightGroups | None:
        return super().weight_groups if self.dense_groups == 0 else None

    def __str__(self) -> str:
        dense = f", {self.dense_groups:.4g} of the groups dense" if self.dense_groups else ""
        return f"{super().__str__()}, factors of filters and places{dense}"
