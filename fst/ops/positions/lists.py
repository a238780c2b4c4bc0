"""The lists of one backward pass: drawn once, and used by each product that draws."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fst.ops import cpp
from fst.ops.geometry import Geometry, positions_of
from fst.ops.positions.draw import draw_positions, measure_positions
from fst.rules.masks import widened
from fst.rules.sampled import Positions, Sampled

SHARE = 8  # the mean is that of one sample in so many


@dataclass
class Lists:
    """Lists of drawn positions of one backward pass.

    grad_output is looked at once, and a list is drawn once for each number of positions.

    Attributes:
        grad_output: (N, Cout, P, Q).
        input: (N, Cin, H, W), which some rules score positions by; None where it was not saved.
        input_size, kernel: (height, width).
        start: of a draw, see `Sampled.choose`.
        with_sums: whether sums of grad_output are needed, for centring.
        planned: kernels, for all backward passes of one form.
    """

    grad_output: Tensor
    input: Tensor | None
    input_size: tuple[int, int]
    kernel: tuple[int, int]
    geometry: Geometry
    start: Tensor
    with_sums: bool
    planned: dict[Any, Callable[..., Any]]
    _scored: tuple[Tensor, Tensor] | None = field(default=None, init=False)
    _drawn: dict[int, Positions] = field(default_factory=dict, init=False)

    @property
    def is_drawn(self) -> bool:
        """True after a list was drawn."""
        return bool(self._drawn)

    def fresh(self, *, with_sums: bool = True) -> Lists:
        """The same, before anything was drawn."""
        return replace(self, with_sums=with_sums and self.with_sums)

    def part(self, count: int) -> Lists:
        """Lists of the first samples, before anything was drawn."""
        some = None if self.input is None else self.input[:count]
        return replace(self, grad_output=self.grad_output[:count], input=some)

    def sums(self, rule: Sampled) -> Tensor:
        """(Cout, kh, kw) Σ dY over the positions whose tap lies inside the image, contiguous; empty
        without ``with_sums``.
        """
        return self._scores(rule)[1]

    def of(self, rule: Sampled, count: int) -> Positions:
        """``count`` positions; by `Sampled.choose`, in C++ where it can be."""
        if count not in self._drawn:
            scores, _ = self._scores(rule)
            draw, start = self._drawing(rule, scores, count)
            self._drawn[count] = Positions(*draw(scores, count, start))
        return self._drawn[count]

    def _drawing(
        self, rule: Sampled, scores: Tensor, count: int
    ) -> tuple[Callable[..., Any], Tensor]:
        form, start = ("choose", scores.dtype), self.start
        if form in self.planned:
            return self.planned[form], start.cpu()
        on_cpu = type(scores) is Tensor and scores.device.type == "cpu"
        known = type(rule).choose is Sampled.choose and scores.dtype == torch.float32
        if not (on_cpu and known) or cpp.missing():
            return rule.choose, start
        self.planned[form] = draw_positions.plan(scores, count, start.cpu())
        return self.planned[form], start.cpu()

    def _scores(self, rule: Sampled) -> tuple[Tensor, Tensor]:
        """Scores of the positions of grad_output, and its sums for centring."""
        if self._scored is None:
            form = self.grad_output.shape, self.grad_output.stride(), self.with_sums
            measure = self.planned.get(form) or self._measuring(rule, form)
            self._scored = measure(self.grad_output)
        return self._scored

    def _measuring(self, rule: Sampled, form: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        grad_output, geometry = self.grad_output, self.geometry
        if positions_of(grad_output) > cpp.MOST_POSITIONS:
            raise ValueError(
                f"grad_output has shape {tuple(grad_output.shape)}: more than {cpp.MOST_POSITIONS} "
                "output positions cannot be sampled; use a smaller batch."
            )
        # The kernel knows the rule's own scores; a subclass may have others.
        if type(rule).scores is not Sampled.scores or cpp.refuses(grad_output):
            return functools.partial(self._measured, rule)
        where = (self.input_size, self.kernel, *geometry[:3], self.with_sums)
        self.planned[form] = measure_positions.plan(grad_output, *where)
        return self.planned[form]

    def _measured(self, rule: Sampled, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        norms = None
        if self.input is not None:
            norms = functools.partial(self._column_norms, self.input, rule.center)
        scores = rule.scores(grad_output, norms)
        if not self.with_sums:
            return scores, scores.new_empty(0)
        size = (grad_output.shape[2], grad_output.shape[3])
        axes = zip(size, self.input_size, self.kernel, *self.geometry[:3], strict=True)
        rows, columns = (_inside(*axis, like=scores) for axis in axes)
        total = grad_output.sum(0, dtype=scores.dtype)
        return scores, torch.einsum("rp,opq,sq->ors", rows, total, columns).contiguous()

    def _column_norms(self, input: Tensor, center: bool) -> Tensor:
        """(N·P·Q,) ‖X_col‖₂ of each position, of X − μ with ``center``; all channels, whatever the
        groups.
        """
        maps = widened(input)
        if center:
            maps = maps - mean_of(input)[:, None, None]
        squares = maps.square().sum(1, keepdim=True)
        window = squares.new_ones(1, 1, *self.kernel)
        return F.conv2d(squares, window, None, *self.geometry[:3]).clamp_(min=0).sqrt_().flatten()


def _inside(
    size: int, input_size: int, taps: int, stride: int, padding: int, dilation: int, *, like: Tensor
) -> Tensor:
    """1 where a tap of an output position lies inside the image, along one axis: (taps, size)."""
    positions = torch.arange(size, device=like.device) * stride - padding
    places = positions + torch.arange(taps, device=like.device)[:, None] * dilation
    return ((places >= 0) & (places < input_size)).to(like.dtype)


def mean_of(input: Tensor) -> Tensor:
    """μ (Cin) of (N, Cin, H, W), from every eighth sample.

    Any μ that does not depend on the draw leaves the gradient exact in the mean.
    """
    wide = torch.promote_types(input.dtype, torch.float32)
    return input[::SHARE].mean((2, 3), dtype=wide).mean(0)  # on a CPU faster than all at once
