"""What replaces the kernels where none can run: the same interface, PyTorch's operators inside.

tests/kernels compare the kernels themselves with those operators.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from torch import Tensor

import fst
from fst.backends import backend
from fst.ops import operands as of


class Job(NamedTuple):
    weight: Tensor
    groups: int
    output: Tensor | None = None
    grad_input: Tensor | None = None
    mask: Tensor | None = None


class PruneWeight:
    """Remembers the weights of each call."""

    Job = Job

    def __init__(self) -> None:
        self.calls: list[int] = []

    def planned(self, _, output, grad_input):
        strategy = fst.Strategy(
            "stand-in",
            output=fst.NM("weight", *output) if output else None,
            grad_input=fst.NM("weight", *grad_input) if grad_input else None,
        )

        def run(job):
            self.calls.append(job.weight.data_ptr())
            dtype = job.weight.dtype if job.output is None else job.output.dtype
            operands = of.PruneWeight(job.weight, strategy, job.groups, dtype)
            found = backend("prune_weight", "torch").plan(operands)(operands)
            for name in ("output", "grad_input", "mask"):
                if getattr(job, name) is not None:
                    getattr(job, name).copy_(getattr(found, name))

        return run


def _prune_gradient(_, n, m, rule, rescale, groups):
    nm = fst.NM("grad_output", n, m, rule=rule, rescale=rescale or "sample_channel")

    def run(grad_output, seed):
        assert seed is None
        return nm.prune_grad_output(grad_output, "grad_input", groups).contiguous()

    return run


def stand_ins() -> dict[str, object]:
    """By the name of the module that each replaces."""
    return {
        "prune_weight": PruneWeight(),
        "prune_gradient": SimpleNamespace(planned=_prune_gradient),
    }
