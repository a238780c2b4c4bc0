"""Convolution shapes, operands and probes shared by the tests of the op."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

import fst
from fst.rules.strategy import Strategy
from tests.oracle.conv import output_size
from tests.strategy_settings import Setting


@dataclass(frozen=True)
class Case:
    """One convolution: input (batch, channels[0], *size), weight (channels[1], …, *kernel)."""

    id: str
    channels: tuple[int, int]
    size: tuple[int, int]
    kernel: tuple[int, int] = (3, 3)
    stride: int | tuple[int, int] = 1
    padding: int | tuple[int, int] | str = 0
    dilation: int | tuple[int, int] = 1
    groups: int = 1
    batch: int = 2
    bias: bool = False
    channels_last: bool = False

    @property
    def geometry(self) -> dict:
        return dict(stride=self.stride, padding=self.padding, dilation=self.dilation)

    @property
    def arguments(self) -> dict:
        return dict(**self.geometry, groups=self.groups)

    @property
    def is_narrow(self) -> bool:
        """Whether the input is narrower than the stride; see `without_onednn`."""
        return self.size[1] < _both(self.stride)[1]

    @property
    def output_size(self) -> tuple[int, int]:
        return output_size(self.size, self.kernel, **self.geometry)

    def operands(self, dtype: torch.dtype = torch.float64) -> Operands:
        generator = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            if len(shape) == 4 and self.channels_last:
                values = values.contiguous(memory_format=torch.channels_last)
            return values

        inputs, outputs = self.channels
        return Operands(
            draw(self.batch, inputs, *self.size),
            draw(outputs, inputs // self.groups, *self.kernel),
            draw(outputs) if self.bias else None,
            draw(self.batch, outputs, *self.output_size),
        )


@dataclass
class Operands:
    """What goes into one convolution and its backward."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    grad_output: Tensor


CASES = (
    Case("basic", (8, 8), (6, 6), padding=1, bias=True),
    Case("odd_nhwc", (5, 9), (5, 7), padding=1, channels_last=True, batch=3),
    Case("stride2_rgb", (3, 6), (9, 8), stride=2, padding=1, bias=True),
    Case("stride_1_2", (6, 8), (6, 9), stride=(1, 2), padding=(0, 2), channels_last=True),
    Case("stride_2_1", (4, 5), (7, 6), stride=(2, 1), padding=(2, 1)),
    Case("kernel_1x1", (13, 12), (5, 7), kernel=(1, 1), batch=1),
    Case("kernel_1x1_stride2", (8, 6), (6, 7), (1, 1), stride=2, channels_last=True),
    Case("kernel_1x7_grouped", (8, 12), (4, 9), (1, 7), padding=(0, 3), groups=2, bias=True),
    Case("kernel_2x2_same", (6, 7), (5, 6), (2, 2), padding="same"),
    Case("dilated_same", (4, 8), (7, 5), padding="same", dilation=2, channels_last=True),
    Case("depthwise", (8, 8), (6, 5), padding=1, groups=8),
    Case("depthwise_multiplier", (3, 12), (7, 7), stride=2, padding=1, groups=3, bias=True),
    Case("grouped_stride2", (12, 10), (7, 7), stride=2, padding=1, groups=2, channels_last=True),
    Case("width_1", (6, 8), (6, 3), padding="valid", bias=True),
    Case("height_1", (6, 8), (3, 8), channels_last=True),
    Case("single_position", (5, 6), (3, 3), batch=1),
    Case("wide_channels", (40, 36), (3, 3), (1, 1), batch=1),
    Case("mixed", (4, 6), (8, 9), (3, 2), stride=(1, 2), padding=(3, 1), dilation=(1, 2)),
    Case("stride3_leaves_a_rest", (4, 4), (9, 11), (2, 2), stride=3, padding=(0, 1), batch=3),
)


def case(id: str) -> Case:
    (found,) = (c for c in CASES if c.id == id)
    return found


# Relative errors of results against the float64 reference.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 4e-3}
# What draws the values of a property test, or of a case of the campaign.
RANDOMS = st.randoms(use_true_random=False)


def random_case(draw: random.Random) -> Case:
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
    return Case(
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


def random_layout(draw: random.Random, tensor: Tensor) -> Tensor:
    """The values, in the memory layout of NCHW or of NHWC."""
    layout = draw.choice((torch.contiguous_format, torch.channels_last))
    return tensor.contiguous(memory_format=layout)


def leaves_of(operands: Operands) -> list[Tensor | None]:
    """Copies of input, weight and bias that take gradients."""
    return [
        None if t is None else t.detach().clone().requires_grad_()
        for t in (operands.input, operands.weight, operands.bias)
    ]


def run(
    case: Case, operands: Operands, strategy: Strategy | str | None, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(output, grad_input, grad_weight, grad_bias) of `sparse_conv2d`, of torch's own for None."""
    given = (operands.input, operands.weight, operands.bias)
    leaves = [None if t is None else t.detach().requires_grad_() for t in given]
    if strategy is None:
        output = F.conv2d(*leaves, **case.arguments)
    else:
        generator = torch.Generator().manual_seed(seed)
        output = fst.sparse_conv2d(
            *leaves, **case.arguments, strategy=strategy, generator=generator
        )
    output.backward(operands.grad_output)
    return (output.detach(), *(None if leaf is None else leaf.grad for leaf in leaves))


def without_onednn(wrong: bool) -> AbstractContextManager:
    """PyTorch's convolutions by kernels of its own, where oneDNN's are wrong.

    Of inputs narrower than the stride, oneDNN's (PyTorch 2.11, AVX-512) read memory that is not
    theirs: weight gradients in 16 bits are NaN at times, and dilated convolutions of channels_last
    maps with a bias crash.
    """
    return torch.backends.mkldnn.flags(enabled=not wrong)


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative error in the Frobenius norm; absolute where the expected value is zero."""
    expected = expected.to(torch.float64)
    norm = expected.norm().item()
    return (actual.to(torch.float64) - expected).norm().item() / (norm or 1.0)


def read_draws(setting: Setting, case: Case, operands: Operands, seed: int = 0) -> dict:
    """The masks that a run with that seed draws, read off from runs on unit operands.

    A mask depends on the generator and on the shape of its operand only, so the other operand
    can be chosen such that a GEMM's result is the pruned operand itself.
    """
    strategy, draws = setting.build(), {}
    (batch, outputs), positions = operands.grad_output.shape[:2], case.output_size
    total = positions[0] * positions[1]

    def probe(input: Tensor, weight: Tensor, grad_output: Tensor, arguments: dict) -> tuple:
        leaves = [input.double().requires_grad_(), weight.double().requires_grad_()]
        generator = torch.Generator().manual_seed(seed)
        output = fst.sparse_conv2d(*leaves, **arguments, strategy=strategy, generator=generator)
        output.backward(grad_output.double())
        return output.detach(), leaves[0].grad, leaves[1].grad

    if "output" in setting.drawn:
        rows = operands.weight[0].numel()
        unit = torch.eye(rows, dtype=torch.float64).reshape(rows, *operands.weight.shape[1:])
        unit = unit.repeat(1, case.groups, 1, 1)
        zeros = torch.zeros(rows, outputs, 1, 1)
        output, _, _ = probe(unit, operands.weight, zeros, dict(groups=case.groups))
        draws["output"] = output.flatten(1).T.reshape(operands.weight.shape) != 0
    if "grad_input" in setting.drawn:
        size = [(n - 1) * s + 1 for n, s in zip(positions, _both(case.stride), strict=True)]
        width = outputs // case.groups
        weight = torch.eye(width).repeat(case.groups, 1)[:, :, None, None]
        arguments = dict(stride=case.stride, groups=case.groups)
        grad = probe(torch.zeros(batch, outputs, *size), weight, operands.grad_output, arguments)[1]
        rows, columns = _both(case.stride)
        draws["grad_input"] = grad[:, :, ::rows, ::columns] != 0
    rule = strategy.grad_weight
    if "grad_weight" in setting.drawn and rule.operand == "input":
        unit = torch.eye(batch * total).reshape(batch, total, batch, total)
        unit = unit.permute(2, 0, 1, 3).reshape(batch, batch * total, *positions)
        unit = unit.repeat(1, case.groups, 1, 1)
        weight = torch.zeros(unit.shape[1], *operands.weight.shape[1:])
        grad = probe(torch.ones_like(operands.input), weight, unit, case.arguments)[2]
        # padding reads zeros whatever the mask: there the mask does not matter
        grad = grad.reshape(case.groups, batch, total, -1).permute(1, 0, 3, 2)
        draws["grad_weight"] = grad.reshape(batch, -1, total) != 0
    elif "grad_weight" in setting.drawn:
        unit = torch.eye(batch * total).reshape(batch * total, batch, *positions).movedim(0, 1)
        weight = torch.zeros(outputs, batch * total, 1, 1)
        grad = probe(unit, weight, operands.grad_output, {})[2]
        grad = grad.reshape(outputs, batch, *positions).movedim(1, 0)
        draws["grad_weight"] = grad != 0
    return draws


def _both(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value
