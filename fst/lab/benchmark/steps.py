"""Timing whole training steps: torch's and each strategy's, eager and compiled, in turns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from fst.backends import prefer
from fst.backends.timing import Function, Timing, sample
from fst.basics.errors import UsageError
from fst.lab.benchmark.layers import PLAIN
from fst.lab.model import Training
from fst.layers.modules import sparse_layers
from fst.ops import cpp
from fst.rules.sampled import Sampled
from fst.rules.strategy import Strategy

# what a gain of the C++ kernels is without one of sampling: a list of all positions
CONTROL = "dense, our kernel"
ALL_LISTED = Strategy(CONTROL, grad_weight=Sampled(keep=1.0, center=False))
BY_LISTS = {"grad_weight": cpp.BACKEND}
COMPILED = "compiled"
RECOMPILE_LIMIT = 64  # candidates share the code of their layers


class Candidate(NamedTuple):
    """A model and its training step."""

    model: nn.Module
    step: Function


class Candidates(NamedTuple):
    """Those that run, by name, and why others do not.

    Names: "torch" or the strategy; behind a comma "compiled" or the forced backends.
    """

    ready: dict[str, Candidate]
    failed: dict[str, str]


def candidates(
    training: Training,
    strategies: Mapping[str, Strategy],
    *,
    compiled: bool = False,
    forced: Mapping[str, str] | None = None,
) -> Candidates:
    """The dense model and each strategy; also compiled, and (eager) with ``forced`` backends where
    those can compute, if wanted.

    With strategies that draw positions comes `CONTROL`. Each has done one step. One that cannot be
    compiled, or fails with the forced backends, is among the failed ones; one in which no forced
    backend takes part is in neither.
    """
    made = Candidates({}, {})

    def attempt(title: str, strategy: Strategy | None, **how: Any) -> None:
        try:
            candidate = _after_a_step(training, strategy, **how)
        except Exception as error:  # of compilers, and of kernels that have not run here before
            made.failed[title] = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
        else:
            preferred = how.get("preferred", {}).items()
            if not preferred or preferred & _computed(candidate.model):
                made.ready[title] = candidate

    for name, strategy in {PLAIN: None, **strategies}.items():
        made.ready[name] = _after_a_step(training, strategy)
        if forced and strategy is not None:
            words = ", ".join(f"{operation}={backend}" for operation, backend in forced.items())
            attempt(f"{name}, {words}", strategy, preferred=forced)
        if compiled:
            torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
            attempt(f"{name}, {COMPILED}", strategy, compiled=True)
    if any(s.sampling is not None for s in strategies.values()) and not cpp.missing():
        attempt(CONTROL, ALL_LISTED, preferred=BY_LISTS)
    return made


def _computed(model: nn.Module) -> set[tuple[str, str]]:
    """Each operation of the layers, and a backend that has computed it in eager code."""
    records = [layer.state.record for layer in sparse_layers(model).values()]
    return {(o, decision.backend) for of in records for o, decision in of.decisions.items()}


def _after_a_step(
    training: Training,
    strategy: Strategy | None,
    compiled: bool = False,
    preferred: Mapping[str, str] | None = None,
) -> Candidate:
    model, plain_step = training.candidate(strategy, compiled)

    def step() -> None:
        with prefer(**preferred or {}):
            plain_step()

    step()
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        name = PLAIN if strategy is None else str(strategy)
        raise UsageError(
            f"{name}: the gradients of random weights on random data are not finite, so a step's "
            "zeros and its time are not those of a training: choose another model."
        )
    return Candidate(model, step if preferred else plain_step)


class StepTimes(NamedTuple):
    """Times of training steps.

    Attributes:
        rounds: of all times.
        step: candidate -> forward, backward and SGD.
        failed: candidate -> why it did not run.
    """

    rounds: int
    step: dict[str, Timing]
    failed: dict[str, str]

    def ratio(self, name: str) -> float:
        """Time of torch's eager step over this one's."""
        return self.step[PLAIN].median / self.step[name].median


def time_steps(
    made: Candidates, training: Training, repeats: int, seconds: float = math.inf
) -> StepTimes:
    """Time a training step (forward, backward, SGD) of each candidate.

    Args:
        repeats: rounds, at most.
        seconds: of the slowest candidate's steps, after which no round begins; there are
            `LEAST_ROUNDS` all the same.
    """
    steps = {name: candidate.step for name, candidate in made.ready.items()}
    taken = sample(steps, repeats, training.device, most=seconds * 1e3)
    times = {name: Timing.of(samples.done) for name, samples in taken.items()}
    return StepTimes(len(taken[PLAIN].done), times, made.failed)
