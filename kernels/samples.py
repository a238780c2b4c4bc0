"""One launch of each kernel, for operands of a ResNet layer: what is compiled to be looked at."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import prune_gradient, prune_weight
from .launch import Launch

SIZE = (256, 64, 56, 56)


def _meta(shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool) -> Tensor:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device="meta", memory_format=layout)


def _prune_weights(last: bool) -> Launch:
    weight = _meta((64, 64, 3, 3), torch.float32, last)
    results = [torch.empty_like(weight, dtype=torch.bfloat16) for _ in range(2)]
    return prune_weight.launches([prune_weight.Job(weight, 1, *results)], (2, 4), (2, 4))[0]


def _prune_gradient(n: int, m: int, rule: str = "magnitude") -> Callable[[bool], Launch]:
    def launch(last: bool) -> Launch:
        grad_output = _meta(SIZE, torch.bfloat16, last)
        seed = torch.empty(1, dtype=torch.int64, device="meta")
        return prune_gradient.prune_launch(
            grad_output, torch.empty_like(grad_output), n, m, rule, "", 1, seed, None
        )

    return launch


def _sums(last: bool) -> Launch:
    grad_output = _meta(SIZE, torch.bfloat16, last)
    return prune_gradient.sums_launch(grad_output, 2, 4, 1)[0]


# name -> whether channels are contiguous -> launch
SAMPLES: dict[str, Callable[[bool], Launch]] = {
    "S(W), S(Wt) 2:4": _prune_weights,
    "grad_output 2:4": _prune_gradient(2, 4),
    "grad_output 2:4 random": _prune_gradient(2, 4, "random"),
    "grad_output 4:8": _prune_gradient(4, 8),
    "sums for rescaling 2:4": _sums,
}
