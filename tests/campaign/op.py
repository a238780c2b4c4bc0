"""Random calls of the op against the literal float64 reference."""

from __future__ import annotations

import random

import torch
from torch import Tensor

import fst
from tests.campaign.weights import Checks
from tests.cases import Case as Shape
from tests.cases import Operands, error, read_draws, without_onednn
from tests.oracle.conv import reference_conv2d
from tests.strategy_settings import SETTINGS

COUNT = 600
NAMES = ("output", "grad_input", "grad_weight", "grad_bias")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 4e-3}
LAYOUTS = ("contiguous", "channels_last", "strided", "transposed", "expanded")


def checks() -> Checks:
    """Random calls."""
    return [("call", COUNT, _check)]


def random_shape(draw: random.Random) -> Shape:
    """A small convolution."""
    groups = draw.choice((1, 1, 2, 3))
    kernel, dilation = (tuple(draw.randint(1, most) for _ in "hw") for most in (4, 2))
    same = draw.random() < 0.3
    stride = (1, 1) if same else (draw.randint(1, 3), draw.randint(1, 3))
    padding = draw.choice(("same", (0, 0))) if same else (draw.randint(0, 3), draw.randint(0, 3))
    pads = (0, 0) if same else padding
    least = [
        max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, pads, strict=True)
    ]
    return Shape(
        "random",
        (groups * draw.randint(1, 9), groups * draw.randint(1, 9)),
        tuple(draw.randint(length, max(length, 10)) for length in least),
        kernel,
        stride,
        padding,
        dilation,
        groups,
        batch=draw.randint(1, 3),
        bias=draw.random() < 0.5,
    )


def _laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The values of ``tensor`` in another memory layout; "expanded" repeats the first sample."""
    if tensor.dim() < 4 or layout == "contiguous":
        return tensor
    if layout == "channels_last":
        return tensor.contiguous(memory_format=torch.channels_last)
    if layout == "strided":
        return torch.stack([tensor, -tensor], dim=4)[..., 0]
    if layout == "transposed":
        return tensor.mT.contiguous().mT
    return tensor[:1].expand_as(tensor)


def _check(draw: random.Random) -> None:
    shape, row = random_shape(draw), draw.choice(SETTINGS)
    # What a rule draws can be read off in float64 alone.
    dtype = torch.float64 if row.drawn else draw.choice(tuple(TOLERANCE))
    torch.manual_seed(draw.getrandbits(32))

    def values(*size: int) -> Tensor:
        return _laid_out(torch.randn(size, dtype=torch.float64).to(dtype), draw.choice(LAYOUTS))

    (inputs, outputs), strategy = shape.channels, row.build()
    operands = Operands(
        values(shape.batch, inputs, *shape.size),
        values(outputs, inputs // shape.groups, *shape.kernel),
        values(outputs) if shape.bias else None,
        values(shape.batch, outputs, *shape.output_size),
    )
    leaves = [
        None if t is None else t.detach().requires_grad_()
        for t in (operands.input, operands.weight, operands.bias)
    ]
    generator = torch.Generator().manual_seed(0)
    with without_onednn(dtype.itemsize == 2):
        output = fst.sparse_conv2d(
            *leaves, **shape.arguments, strategy=strategy, generator=generator
        )
        output.backward(operands.grad_output)
    actual = (output, *(None if leaf is None else leaf.grad for leaf in leaves))
    draws = read_draws(row, shape, operands)
    draws["start"] = torch.rand((), generator=generator.manual_seed(0), dtype=torch.float64)
    wrong = []
    for phase in (0, 1) if row.random_phase else (0,):
        expected = reference_conv2d(
            operands.input,
            operands.weight,
            operands.grad_output,
            bias=operands.bias,
            **shape.arguments,
            strategy=strategy,
            draws={**draws, "phase": phase},
        )
        errors = {
            name: error(a.detach(), e)
            for name, a, e in zip(NAMES, actual, expected, strict=True)
            if e is not None
        }
        wrong.append({name: e for name, e in errors.items() if not e <= TOLERANCE[dtype]})
    assert not all(wrong), f"off by {min(wrong, key=len)} ({row.id}, {dtype}, {shape})"
