"""Which rule of grad_weight each layer can bear: measured on a few batches, chosen for a budget."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fst.backends import timing
from fst.basics.sharding import refuse_sharded
from fst.basics.text import table
from fst.basics.values import check_module, is_number, one_of
from fst.gradients import Gradients, Loss, recorded
from fst.rules.bands import Bands
from fst.rules.by_name import chosen_rule, options_of
from fst.rules.rule import Rule, phases_of
from fst.rules.sampled import Sampled

CHOICES = (
    Sampled(axis="rows"),
    Sampled(axis="both"),
    Sampled(keep=4, axis="rows"),
    Sampled(keep=4, axis="both"),
    Bands(),
    Bands(sample=()),
)
COSTS = ("multiply-adds", "time")
REPEATS = 5
BIAS_WEIGHT = 6.0  # of the share of the mean, beside that of the variance: see `plan`


@dataclass
class _Estimates:
    """What a choice made of one layer's gradients: sums over batches, in float64."""

    count: int = 0
    total: Tensor = field(
        default_factory=lambda: torch.zeros((), dtype=torch.float64, device="cpu")
    )
    squares: float = 0.0

    def add(self, value: Tensor) -> None:
        value = value.to(torch.float64)
        self.count += 1
        self.total = self.total + value
        self.squares += float(value.square().sum())

    @property
    def spread(self) -> float:
        """Variance: E|v - E v|² over all elements."""
        if self.count < 2:
            return 0.0
        return max(0.0, self.squares - self.count * self.square_of_mean) / (self.count - 1)

    @property
    def square_of_mean(self) -> float:
        """|E v|²."""
        return float((self.total / self.count).square().sum()) if self.count else 0.0


@dataclass
class Choice:
    """A rule for one layer (None: dense), what it loses and what it costs."""

    rule: Rule | None
    bias: float = 0.0
    variance: float = 0.0
    multiply_adds: float = 0.0  # of all batches
    milliseconds: float = 0.0
    errors: _Estimates = field(default_factory=_Estimates)
    noise: float = 0.0  # mean over batches of the variance of the draw

    @property
    def loss(self) -> float:
        """What a plan keeps small: `BIAS_WEIGHT` · bias + variance."""
        return BIAS_WEIGHT * self.bias + self.variance


class Measured(NamedTuple):
    """A layer: the shape of its weight and its choices, of which the first is dense."""

    shape: torch.Size
    choices: list[Choice]

    @property
    def multiply_adds(self) -> float:
        """Those of the exact gradient."""
        return self.choices[0].multiply_adds


def plan(
    model: nn.Module,
    batches: Any,
    budget: float = 0.5,
    *,
    cost: str = "multiply-adds",
    loss: Loss | None = None,
    choices: Iterable[Rule | Mapping[str, Any]] = CHOICES,
    log: Callable[[str], object] = print,
) -> dict[str, dict[str, Any] | None]:
    """Choose a rule of grad_weight for each convolution, so that all together meet a budget.

    For each layer and choice it is measured which share of the gradient's mean is lost (bias:
    |E ĝ − E g|²/|E g|²), how large the variance of the estimate is beside that between batches
    (E|ĝ − E ĝ|²/E|g − E g|²; with one batch, beside |g|²), and the time. A layer loses
    6 · bias + variance: in trainings of a small network a lost share of the mean cost some six
    times the accuracy of the same share of variance (docs/weight_gradient.md), a rule of thumb. The
    plan has the least sum over the layers.

    Args:
        model: converted, or a dense one, of which all convolutions that `fst.convert` takes are
            planned. It is left as it is; one that was trained for a while tells more than a new
            one.
        batches: a batch (inputs, targets), or better a list of some.
        budget: the share of the dense cost of all grad_weights that is to remain, above 0, up to 1.
        cost: "multiply-adds", or "time" as measured here.
        loss: (model, batch) -> scalar; None: cross-entropy of model(inputs) and targets.
        choices: rules to choose from beside dense, or their options as in a plan.
        log: what prints the table.

    Returns:
        Layer name -> options of its rule, None for dense: plain data for ``fst.convert(model,
        strategy, plan=...)`` and for ``sparsity = dict(plan=...)`` in a config.

    Raises:
        ValueError: the budget cannot be met, an argument has a bad value, there is nothing to
            plan, or a layer's gradients are all zero, or not finite.
        TypeError: an argument is of a wrong type.
    """
    check_budget(budget, cost)
    measured = measure(model, batches, loss=loss, choices=choices)
    chosen = best(measured, budget, cost)
    log(_table(measured, chosen))
    return {name: options_of(choice.rule) for name, choice in chosen.items()}


def measure(
    model: nn.Module,
    batches: Any,
    *,
    loss: Loss | None = None,
    choices: Iterable[Rule | Mapping[str, Any]] = CHOICES,
) -> dict[str, Measured]:
    """What each choice costs and loses in each convolution; arguments and errors as in `plan`."""
    check_module(model)
    rules = [chosen_rule(choice) for choice in choices]
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        kind = type(batches).__name__
        raise TypeError(f"batches is a {kind}; it must be a batch (inputs, targets), or some.")
    batches = [batches] if _is_one_batch(batches) else list(batches)
    if not batches:
        raise ValueError("batches=[] must hold at least one batch.")
    refuse_sharded(model, "plan", "plan before fully_shard")
    model = copy.deepcopy(model)
    exact: dict[str, _Estimates] = {}
    found: dict[str, Measured] = {}
    for batch in batches:
        for name, layer in recorded(model, batch, loss).items():
            exact.setdefault(name, _Estimates()).add(layer.exact)
            if name not in found:
                found[name] = Measured(layer.weight.shape, [Choice(None), *map(Choice, rules)])
                _time(layer, found[name].choices)
            for choice in found[name].choices:
                _estimate(layer, choice)
    wild = [name for name, estimates in exact.items() if not math.isfinite(estimates.squares)]
    if wild:
        raise ValueError(f"batches: the gradients of {', '.join(wild)} are not finite.")
    silent = [name for name, estimates in exact.items() if not estimates.squares]
    if silent:
        raise ValueError(
            f"batches: the gradients of {', '.join(silent)} are zero in all of them, so nothing "
            "can be measured there. Train for some steps first: a residual branch whose last gain "
            "begins at zero has no gradient until then."
        )
    for name, measured in found.items():
        _rate(measured.choices, exact[name])
    return found


def check_budget(budget: float, cost: str) -> None:
    """Raise ValueError unless both are as `plan` needs them."""
    if not is_number(budget) or not 0 < budget <= 1:
        raise ValueError(f"budget={budget!r} must be a number above 0 and at most 1.")
    one_of("cost", cost, COSTS)


def _is_one_batch(batches: Iterable[Any]) -> bool:
    """A list of tensors is what DataLoader makes of pairs."""
    if isinstance(batches, list):
        return bool(batches) and all(isinstance(part, Tensor) for part in batches)
    return isinstance(batches, tuple | Mapping)


def _estimate(layer: Gradients, choice: Choice) -> None:
    """Add the error of the mean over all draws, the variance of a draw, and what it costs."""
    choice.multiply_adds += layer.cost(choice.rule)
    draws = [layer.of(choice.rule, phase).double() for phase in phases_of(choice.rule)]
    mean = sum(draws) / len(draws)
    choice.errors.add(mean - layer.exact.double())
    choice.noise += sum(float((draw - mean).square().sum()) for draw in draws) / len(draws)


def _time(layer: Gradients, choices: list[Choice]) -> None:
    """Milliseconds of each choice."""
    functions = {
        str(index): functools.partial(layer.of, choice.rule, phases_of(choice.rule)[0])
        for index, choice in enumerate(choices)
    }
    taken = timing.compare(functions, REPEATS, layer.weight.device, warmup=1)
    for index, choice in enumerate(choices):
        choice.milliseconds = taken[str(index)].median


def _rate(choices: list[Choice], exact: _Estimates) -> None:
    """Bias and variance as shares; with one batch the variance is beside the gradient itself."""
    signal = exact.square_of_mean or 1.0
    for choice in choices[1:]:
        choice.bias = choice.errors.square_of_mean / signal
        choice.variance = choice.noise / exact.count / (exact.spread or signal)


def _price(choice: Choice, cost: str) -> float:
    """What ``choice`` costs: multiply-adds, or milliseconds."""
    return choice.milliseconds if cost == "time" else choice.multiply_adds


def best(found: Mapping[str, Measured], budget: float, cost: str) -> dict[str, Choice]:
    """The choices of least loss within the budget: a knapsack, layer by layer.

    Combinations that cost nearly the same (in 4,000 steps) share a step, of which only the best and
    the cheapest are followed.
    """
    whole = sum(_price(measured.choices[0], cost) for measured in found.values())
    states: list[tuple[float, float, tuple[Choice, ...]]] = [(0.0, 0.0, ())]
    for measured in found.values():
        steps: dict[int, list[tuple[float, float, tuple[Choice, ...]]]] = {}
        for paid, lost, taken in states:
            for choice in measured.choices:
                state = (paid + _price(choice, cost), lost + choice.loss, (*taken, choice))
                steps.setdefault(round(state[0] / whole * 4000), []).append(state)
        states = [state for near in steps.values() for state in _best_and_cheapest(near)]
    allowed = [state for state in states if state[0] <= budget * whole * (1 + 1e-9)]
    if not allowed:
        least = min(state[0] for state in states) / whole
        raise ValueError(
            f"budget={budget} of the {cost} cannot be met by these choices; "
            f"the least is {least:.3f}."
        )
    taken = min(allowed, key=lambda state: state[1])[2]
    return dict(zip(found, taken, strict=True))


def _best_and_cheapest(
    states: list[tuple[float, float, tuple[Choice, ...]]],
) -> list[tuple[float, float, tuple[Choice, ...]]]:
    best = min(states, key=lambda state: (state[1], state[0]))
    cheapest = min(states)
    return [best] if cheapest[0] == best[0] else [best, cheapest]


def _table(found: dict[str, Measured], chosen: dict[str, Choice]) -> str:
    whole = sum(measured.multiply_adds for measured in found.values())
    rows = []
    for name, choice in chosen.items():
        shape, (dense, *_) = found[name]
        rule = "dense" if choice.rule is None else str(choice.rule).removeprefix("input ")
        times = f"{dense.milliseconds:.2f} -> {choice.milliseconds:.2f}"
        lost = (f"{choice.bias:.3f}", f"{choice.variance:.3f}")
        rows.append(
            (
                name,
                "x".join(map(str, shape)),
                f"{dense.multiply_adds / whole:.1%}",
                rule,
                *lost,
                times,
            )
        )
    shares = []
    for cost in COSTS:
        prices = [
            (_price(choice, cost), _price(found[name].choices[0], cost))
            for name, choice in chosen.items()
        ]
        left, of = (sum(column) for column in zip(*prices, strict=True))
        shares.append(f"{left / of:.1%} of the {cost}")
    header = ("layer", "weight", "of all", "grad_weight", "mean lost", "variance", "ms")
    return f"{table(header, rows)}\n\n{' and '.join(shares)} of all grad_weights remain"
