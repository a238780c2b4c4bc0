"""dW and dX over positions that are drawn by importance, where these are faster than exact ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fst.backends import dispatch
from fst.ops import cpp
from fst.ops.geometry import Geometry, gradients, input_gradient
from fst.ops.positions import draw, native, products
from fst.ops.positions.products import Listed
from fst.rules.sampled import Positions, Sampled
from fst.rules.strategy import Strategy

EXACT = "dense"  # the backend that samples nothing
LISTED = (cpp.BACKEND, "torch")  # the backends that compute from lists
SHARE = 8  # the mean is that of one sample in so many
Product = Callable[..., Tensor]


class Step(NamedTuple):
    """One backward pass of a convolution.

    Attributes:
        grad_output: (N, Cout, P, Q).
        input: (N, Cin, H, W); None where there is no grad_weight.
        input_shape: its shape.
        weight: (Cout, Cin/groups, kh, kw), as grad_input multiplies with it.
        start: (), where draws of positions start.
        joint: whether a dense grad_input is wanted too: the library computes both gradients in less
            time than one after the other, so it is part of what is timed.
    """

    grad_output: Tensor
    input: Tensor | None
    input_shape: torch.Size
    weight: Tensor
    geometry: Geometry
    start: Tensor
    joint: bool

    @property
    def positions(self) -> int:
        """Output positions of the batch."""
        return self.grad_output[:, 0].numel()


class Lists:
    """The lists of a step: grad_output is looked at once, and a list is drawn once."""

    def __init__(self, step: Step, *, with_sums: bool) -> None:
        self._step, self._with_sums = step, with_sums
        self._scored: draw.Scored | None = None
        self._drawn: dict[int, Positions] = {}

    def scored(self, rule: Sampled) -> draw.Scored:
        """The scores of the positions, and the sums if they were asked for."""
        if self._scored is None:
            self._scored = _score(self._step, rule, with_sums=self._with_sums)
        return self._scored

    def of(self, rule: Sampled, count: int) -> Positions:
        """``count`` positions."""
        if count not in self._drawn:
            scores = self.scored(rule).scores
            self._drawn[count] = draw.choose(rule, scores, count, self._step.start)
        return self._drawn[count]


def _score(step: Step, rule: Sampled, *, with_sums: bool) -> draw.Scored:
    size, kernel = step.input_shape[2:], step.weight.shape[2:]
    sizes = (size[0], size[1]), (kernel[0], kernel[1])
    norms = None if step.input is None else functools.partial(_column_norms, step, rule.center)
    where = (*sizes, step.geometry)
    return draw.score(rule, step.grad_output, *where, with_sums=with_sums, column_norms=norms)


def _column_norms(step: Step, center: bool) -> Tensor:
    """(N·P·Q,) ‖X_col‖₂ of each position, of X − μ with ``center``; all channels, whatever the
    groups.
    """
    input = step.input.to(_wide(step.input.dtype))
    if center:
        input = input - mean_of(step.input)[:, None, None]
    squares = input.square().sum(1, keepdim=True)
    window = squares.new_ones(1, 1, *step.weight.shape[2:])
    return F.conv2d(squares, window, None, *step.geometry[:3]).clamp_(min=0).sqrt_().flatten()


def grad_weight(step: Step, rule: Sampled) -> tuple[Tensor | None, Tensor, Lists | None]:
    """dX if ``step.joint``, dW (Cout, Cin/groups, kh, kw), and the lists that it was computed with;
    None if exactly.
    """
    count, lists = draw.count_of(rule.density, step.positions), None
    if count == step.positions and not dispatch.demanded("grad_weight", LISTED):
        dispatch.note("grad_weight", EXACT, "all positions are kept")
        return *_exact(step), None

    def exact() -> tuple[Tensor | None, Tensor]:
        nonlocal lists
        lists = None
        return _exact(step)

    def sampled(product: Product) -> tuple[Tensor | None, Tensor]:
        nonlocal lists
        lists = Lists(step, with_sums=rule.center)  # a candidate's time includes the choice
        sums = lists.scored(rule).sums
        found = _sampled_grad_weight(step, rule, lists.of(rule, count), sums, product)
        return _gradients(step, (True, False, False))[0] if step.joint else None, found

    candidates = {EXACT: exact, **_candidates("grad_weight", step, sampled)}
    return *_run("grad_weight", candidates, step, (str(rule), count, step.joint)), lists


def grad_input(step: Step, rule: Sampled, lists: Lists | None) -> Tensor:
    """dX (N, Cin, H, W), with the lists of dW where there are some."""
    count = draw.count_of(rule.density, step.positions)

    def exact() -> Tensor:
        return input_gradient(step.grad_output, step.weight, step.geometry, step.input_shape)

    if count == step.positions and not dispatch.demanded("grad_input", LISTED):
        dispatch.note("grad_input", EXACT, "all positions are kept")
        return exact()

    def sampled(product: Product) -> Tensor:
        drawn = (lists or Lists(step, with_sums=False)).of(rule, count)
        listed, where = Listed(*drawn), (step.input_shape, step.geometry)
        return product(step.grad_output, step.weight, listed, *where)

    candidates = {EXACT: exact, **_candidates("grad_input", step, sampled)}
    return _run("grad_input", candidates, step, (str(rule), count, lists is None))


def _exact(step: Step) -> tuple[Tensor | None, Tensor]:
    return _gradients(step, (step.joint, True, False))[:2]


def _gradients(step: Step, wanted: tuple[bool, bool, bool]) -> Any:
    return gradients(step.grad_output, step.input, step.weight, step.geometry, wanted)


def _sampled_grad_weight(
    step: Step, rule: Sampled, drawn: Positions, sums: Tensor, product: Product
) -> Tensor:
    """dW over the drawn positions, with what the mean of the input contributes."""
    maps = (step.grad_output, step.input, step.weight)
    center = (mean_of(step.input), sums) if rule.center else ()
    return product(*maps, Listed(*drawn, None, *center), step.geometry)


def mean_of(input: Tensor) -> Tensor:
    """μ (Cin) of (N, Cin, H, W), from every eighth sample: batches may be sorted.

    Any μ that does not depend on the draw leaves the gradient exact in the mean.
    """
    return input[::SHARE].mean((0, 2, 3), dtype=_wide(input.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def was_exact(
    record: dispatch.Record | None, strategy: Strategy, need_input: bool, need_weight: bool
) -> bool:
    """Whether no GEMM of this step was sampled, because times were measured that say so."""
    if record is None or not strategy.only_samples or not need_weight:
        return False
    gemms = [g for g in ("grad_weight", "grad_input") if strategy.rule(g) is not None]
    found = [record.get(gemm) for gemm in gemms if gemm == "grad_weight" or need_input]
    return all(d is not None and d.backend == EXACT and d.times for d in found)


def _candidates(
    gemm: str, step: Step, sampled: Callable[[Product], Any]
) -> dict[str, Callable[[], Any]]:
    """The backends that can compute a GEMM from a list."""
    of_weight, found = gemm == "grad_weight", {}
    if cpp.takes_lists(step.grad_output, step.input if of_weight else step.weight):
        by_cpp = native.grad_weight if of_weight else native.grad_input
        found[cpp.BACKEND] = functools.partial(sampled, by_cpp)
    if not found or dispatch.demanded(gemm, ("torch",)):
        by_torch = products.grad_weight if of_weight else products.grad_input
        found["torch"] = functools.partial(sampled, by_torch)
    return found


def _run(
    gemm: str, candidates: dict[str, Callable[[], Any]], step: Step, options: tuple[Any, ...]
) -> Any:
    options = (*options, tuple(step.input_shape), *step.geometry)
    return dispatch.compute(gemm, candidates, (step.grad_output, step.weight), options, exact=EXACT)
