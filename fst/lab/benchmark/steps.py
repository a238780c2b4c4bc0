"""Timing whole training steps: torch's and each strategy's, eager and compiled, in turns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from fst.backends import prefer
from fst.backends.timing import Function, Timing, compare, sample
from fst.basics.errors import UsageError
from fst.lab.benchmark.layers import ALL_LISTED, BY_LISTS, CONTROL, PLAIN
from fst.lab.model import Training
from fst.layers.modules import sparse_layers
from fst.ops import cpp
from fst.rules.strategy import Strategy

COMPILED = "compiled"
RECOMPILE_LIMIT = 64  # candidates share the code of their layers


class Candidate(NamedTuple):
    """A model and its training step.

    Attributes:
        strategy: None for the dense model.
        preferred: backends that the step uses where they can compute.
    """

    model: nn.Module
    step: Function
    strategy: Strategy | None
    preferred: dict[str, str]

    def used(self) -> dict[str, str]:
        """Those of the preferred backends that have computed something in eager code."""
        decided = [
            (operation, decision.backend)
            for layer in sparse_layers(self.model).values()
            for operation, decision in layer.state.record.decisions.items()
        ]
        return {o: name for o, name in self.preferred.items() if (o, name) in decided}


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
    those can compute, if asked for.

    Beside strategies that draw positions there is `CONTROL`. Each has done one step. One that
    cannot be compiled, or fails with the forced backends, is among the failed ones; one in which no
    forced backend takes part is left out.
    """
    made = Candidates({}, {})
    for name, strategy in {PLAIN: None, **strategies}.items():
        made.ready[name] = _after_a_step(training, strategy)
        if forced and strategy is not None:
            title = f"{name}, {_words(forced)}"
            try:
                candidate = _after_a_step(training, strategy, preferred=forced)
            except Exception as error:  # whatever kernels raise that have not run here before
                made.failed[title] = _in_a_line(error)
            else:
                if candidate.used():
                    made.ready[f"{name}, {_words(candidate.used())}"] = candidate
        if compiled:
            torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
            title = f"{name}, {COMPILED}"
            try:
                made.ready[title] = _after_a_step(training, strategy, compiled)
            except Exception as error:  # the compiler's many kinds
                made.failed[title] = _in_a_line(error)
    if any(s.sampling is not None for s in strategies.values()) and not cpp.missing():
        control = _after_a_step(training, ALL_LISTED, preferred=BY_LISTS)
        if control.used():
            made.ready[CONTROL] = control
    return made


def _words(backends: Mapping[str, str]) -> str:
    return ", ".join(f"{operation}={name}" for operation, name in backends.items())


def _in_a_line(error: Exception, limit: int = 300) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= limit else f"{text[:limit]} …"


def _after_a_step(
    training: Training,
    strategy: Strategy | None,
    compiled: bool = False,
    preferred: Mapping[str, str] | None = None,
) -> Candidate:
    model, plain_step = training.candidate(strategy, compiled)
    preferred = dict(preferred or {})

    def step() -> None:
        with prefer(**preferred):
            plain_step()

    step()
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        name = PLAIN if strategy is None else str(strategy)
        raise UsageError(
            f"{name}: the gradients of random weights on random data are not finite, so a step's "
            "zeros and its time are not those of a training: choose another model."
        )
    return Candidate(model, step if preferred else plain_step, strategy, preferred)


class StepTimes(NamedTuple):
    """Times of training steps.

    Attributes:
        rounds: of all times.
        step: candidate -> forward, backward and SGD.
        host: candidate -> until the step's calls have returned; on CUDA alone.
        pruning: candidate -> S(W) and S(Wᵀ) of all layers whose weight is trained.
        failed: candidate -> why it did not run.
    """

    rounds: int
    step: dict[str, Timing]
    host: dict[str, Timing]
    pruning: dict[str, Timing]
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
    device = training.device
    steps = {name: candidate.step for name, candidate in made.ready.items()}
    taken = sample(steps, repeats, device, most=seconds * 1e3)
    rounds = len(taken[PLAIN].done)
    pruning = {
        name: _pruning_of(candidate, training.amp_dtype)
        for name, candidate in made.ready.items()
        if candidate.strategy is not None and not name.endswith(COMPILED)
    }
    host = taken if device.type == "cuda" else {}
    return StepTimes(
        rounds,
        {name: Timing.of(samples.done) for name, samples in taken.items()},
        {name: Timing.of(samples.returned) for name, samples in host.items()},
        compare(pruning, rounds, device),
        made.failed,
    )


def _pruning_of(candidate: Candidate, amp_dtype: torch.dtype | None) -> Function:
    layers = [x for x in sparse_layers(candidate.model).values() if x.weight.requires_grad]

    def prune() -> None:
        with prefer(**candidate.preferred):
            for layer in layers:
                layer.pruned(amp_dtype or layer.weight.dtype)

    return prune
