"""The lists of one backward pass: drawn once, and used by each product that draws."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fst.ops.geometry import Geometry
from fst.ops.positions import draw
from fst.rules.sampled import Positions, Sampled

SHARE = 8  # the mean is that of one sample in so many


class Lists:
    """Lists of drawn positions of one backward pass.

    grad_output is looked at once, and a list is drawn once for each number of positions.

    Attributes:
        is_drawn: True after a list was drawn.
    """

    def __init__(
        self,
        grad_output: Tensor,
        input: Tensor | None,
        input_size: tuple[int, int],
        kernel: tuple[int, int],
        geometry: Geometry,
        start: Tensor,
        *,
        with_sums: bool,
        planned: dict[Any, Callable[..., Any]],
    ) -> None:
        """Prepare to draw.

        Args:
            planned: kernels, for all backward passes of one form.
        """
        self._planned = planned
        self._maps = grad_output, input
        self._where = input_size, kernel, geometry
        self._start, self._with_sums = start, with_sums
        self._scored: draw.Scored | None = None
        self._drawn: dict[int, Positions] = {}
        self.is_drawn = False

    def fresh(self, *, with_sums: bool = True) -> Lists:
        """The same, before anything was drawn."""
        return self._of(*self._maps, with_sums and self._with_sums)

    def part(self, count: int) -> Lists:
        """Lists of the first samples, before anything was drawn."""
        grad_output, input = self._maps
        some = None if input is None else input[:count]
        return self._of(grad_output[:count], some, self._with_sums)

    def _of(self, grad_output: Tensor, input: Tensor | None, with_sums: bool) -> Lists:
        input_size, kernel, geometry = self._where
        where = (input_size, kernel, geometry, self._start)
        return Lists(grad_output, input, *where, with_sums=with_sums, planned=self._planned)

    def sums(self, rule: Sampled) -> Tensor:
        """(Cout, kh, kw) Σ dY over the positions whose tap lies inside the image."""
        return self._scores(rule).sums

    def of(self, rule: Sampled, count: int) -> Positions:
        """``count`` positions."""
        if count not in self._drawn:
            scores = self._scores(rule).scores
            self._drawn[count] = draw.choose(rule, scores, count, self._start, self._planned)
            self.is_drawn = True
        return self._drawn[count]

    def _scores(self, rule: Sampled) -> draw.Scored:
        if self._scored is None:
            grad_output, input = self._maps
            norms = None
            if input is not None:
                norms = functools.partial(self._column_norms, input, rule.center)
            self._scored = draw.score(
                *(rule, grad_output, *self._where),
                with_sums=self._with_sums,
                planned=self._planned,
                column_norms=norms,
            )
        return self._scored

    def _column_norms(self, input: Tensor, center: bool) -> Tensor:
        """(N·P·Q,) ‖X_col‖₂ of each position, of X − μ with ``center``; all channels, whatever the
        groups.
        """
        _, kernel, geometry = self._where
        maps = input.to(wide(input.dtype))
        if center:
            maps = maps - mean_of(input)[:, None, None]
        squares = maps.square().sum(1, keepdim=True)
        window = squares.new_ones(1, 1, *kernel)
        return F.conv2d(squares, window, None, *geometry[:3]).clamp_(min=0).sqrt_().flatten()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.promote_types(dtype, torch.float32)


def mean_of(input: Tensor) -> Tensor:
    """μ (Cin) of (N, Cin, H, W), from every eighth sample.

    Any μ that does not depend on the draw leaves the gradient exact in the mean.
    """
    return input[::SHARE].mean((0, 2, 3), dtype=wide(input.dtype))
