"""Random tensors with all that rules of pruning stumble over, strategies, and bits to compare."""

from __future__ import annotations

import torch
from torch import Tensor

from fst import NM, Strategy

Pattern = tuple[int, int] | None  # (n, m)
FORMATS = ("contiguous", "channels_last", "sliced")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def awkward(shape: tuple[int, int, int, int], dtype: torch.dtype, memory: str) -> Tensor:
    """Ties everywhere, signed zeros, infinities, NaN, and values that overflow float16."""
    height, width = shape[2:]
    larger = (shape[0], shape[1] + 1, height, width + 3) if memory == "sliced" else shape
    values = torch.randn(larger)
    values[:, ::3] = -values[:, :1]
    special = torch.tensor([float("nan"), -0.0, float("-inf"), float("inf"), 1e5, 0.0, -0.0])
    values.flatten()[:: 7 * len(special)].fill_(0.0)
    start = values.flatten()[: len(special)]
    start.copy_(special[: len(start)])
    values = values.to(dtype)
    if memory == "sliced":
        return values[:, 1:, :, 1:-2]
    return values.contiguous(
        memory_format=torch.channels_last if memory == "channels_last" else torch.contiguous_format
    )


def of_patterns(output: Pattern, grad_input: Pattern) -> Strategy:
    """Weights pruned by these patterns in output and grad_input; None: dense."""
    return Strategy(
        "test",
        output=NM("weight", *output) if output else None,
        grad_input=NM("weight", *grad_input) if grad_input else None,
    )


def concentrated(memory: str) -> Tensor:
    """dY of which channel 0 is kept where it is tiny: its L1 norm grows by more than 65504."""
    values = torch.ones(1, 8, 56, 56, dtype=torch.float16)
    values[:, 1:4] = 2
    values[:, :4, 0, 0] = 0
    values[0, 0, 0, 0] = 0.03
    format = torch.channels_last if memory == "channels_last" else torch.contiguous_format
    return values.contiguous(memory_format=format)


def bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor's values on the CPU, all NaN alike."""
    tensor = tensor.cpu()
    integers = tensor.view(_INTEGERS[tensor.itemsize])
    return integers.masked_fill(tensor.isnan(), 1)


def with_threads(threads: int, function, *arguments):
    """``function`` on so many threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return function(*arguments)
    finally:
        torch.set_num_threads(before)
