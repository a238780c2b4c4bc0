"""Random calls of the op against the literal float64 reference."""

from __future__ import annotations

import random

import torch
from torch import Tensor

import fst
from tests.campaign.shared import TOLERANCE, Checks, random_shape
from tests.cases import Operands, error, read_draws, without_onednn
from tests.oracle.conv import reference_conv2d
from tests.strategy_settings import SETTINGS

NAMES = ("output", "grad_input", "grad_weight", "grad_bias")
LAYOUTS = ("contiguous", "channels_last", "strided", "transposed", "expanded")


def checks() -> Checks:
    """Random calls."""
    return [("call", 600, _check)]


def _in_layout(tensor: Tensor, layout: str) -> Tensor:
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
    # what a rule draws can be read off in float64 alone
    dtype = torch.float64 if row.drawn else draw.choice(tuple(TOLERANCE))
    torch.manual_seed(draw.getrandbits(32))

    def values(*size: int) -> Tensor:
        return _in_layout(torch.randn(size, dtype=torch.float64).to(dtype), draw.choice(LAYOUTS))

    (inputs, outputs), strategy = shape.channels, row.build()
    operands = Operands(
        values(shape.batch, inputs, *shape.size),
        values(outputs, inputs // shape.groups, *shape.kernel),
        values(outputs) if shape.bias else None,
        values(shape.batch, outputs, *shape.output_size),
    )
    leaves = [None if t is None else t.detach().requires_grad_() for t in vars(operands).values()]
    generator, given = torch.Generator().manual_seed(0), shape.arguments
    with without_onednn(dtype.itemsize == 2 or shape.size[1] < shape.stride[1]):
        output = fst.sparse_conv2d(*leaves[:3], **given, strategy=strategy, generator=generator)
        output.backward(operands.grad_output)
    actual = (output, *(None if leaf is None else leaf.grad for leaf in leaves[:3]))
    draws = read_draws(row, shape, operands)
    draws["start"] = torch.rand((), generator=generator.manual_seed(0), dtype=torch.float64)
    # Probabilities are in units of 2⁻³¹, and the last bit of a score may move one by a unit.
    allowed = max(TOLERANCE[dtype], 1e-8 if strategy.sampling else 0.0)
    wrong = []
    for phase in (0, 1) if row.random_phase else (0,):
        expected = reference_conv2d(
            *(operands.input, operands.weight, operands.grad_output),
            bias=operands.bias,
            **given,
            strategy=strategy,
            draws={**draws, "phase": phase},
        )
        errors = {
            name: error(a.detach(), e)
            for name, a, e in zip(NAMES, actual, expected, strict=True)
            if e is not None
        }
        wrong.append({name: e for name, e in errors.items() if not e <= allowed})
    assert not all(wrong), f"off by {min(wrong, key=len)} ({row.id}, {dtype}, {shape})"
