"""One launch of each kernel, for operands of a ResNet layer: what is compiled to be looked at."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import grad_weight, pair_sums, prune_gradient, prune_weight
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


def _pair_sum(last: bool) -> Launch:
    half = (*SIZE[:3], SIZE[3] // 2)
    operands = (_meta(size, torch.bfloat16, last) for size in (SIZE, half))
    return pair_sums.sum_launch(*operands, (1, 2), (0, 1, 0, 2))


def _grad_weight(
    channels: tuple[int, int], size: int, kernel: int, dtype: torch.dtype = torch.bfloat16
) -> Callable[[bool], Launch]:
    """A layer with pairs along rows; its 1x1 kernels read the kept half of their input."""

    def launch(last: bool) -> Launch:
        grad_output = _meta((SIZE[0], channels[1], size, size), dtype, last)
        columns = size if kernel > 1 else size // 2
        input = _meta((SIZE[0], channels[0], size, columns), dtype, last)
        weight = _meta((channels[1], channels[0], kernel, kernel), dtype, last)
        edge = kernel // 2
        window = (-edge, 1, -edge, 2 if kernel > 1 else 1)
        problem = grad_weight.Problem((1, 2), True, [(0, 1, 0, 2)], [window], (1, 1), 1)
        return grad_weight.launches(grad_output, [input], weight, problem)[0]

    return launch


# name -> whether channels are contiguous -> launch
SAMPLES: dict[str, Callable[[bool], Launch]] = {
    "S(W), S(Wt) 2:4": _prune_weights,
    "grad_output 2:4": _prune_gradient(2, 4),
    "grad_output 2:4 random": _prune_gradient(2, 4, "random"),
    "grad_output 4:8": _prune_gradient(4, 8),
    "sums for rescaling 2:4": _sums,
    "pair sum": _pair_sum,
    "grad_weight 64->64 3x3": _grad_weight((64, 64), 56, 3),
    "grad_weight 512->512 3x3": _grad_weight((512, 512), 7, 3),
    "grad_weight 64->256 1x1": _grad_weight((64, 256), 56, 1),
    "grad_weight 512->128 1x1": _grad_weight((512, 128), 28, 1),
    "grad_weight 3->64 7x7": _grad_weight((3, 64), 112, 7),
    "grad_weight 64->64 float32": _grad_weight((64, 64), 56, 3, torch.float32),
}
