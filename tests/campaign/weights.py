"""No stale S(W): the call after any change of the weight has the mask of the weight as it is."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fst
from tests.campaign.changes import CHANGES, Change, FunctionalNet, Net, Situation
from tests.cases import error
from tests.oracle.conv import output_size, reference_operands
from tests.strategy_settings import Setting, setting

Checks = list[tuple[str, int, Callable[[random.Random], None]]]
COUNT = 5  # of each change, at scale 1
ROWS = [
    setting(name)
    for name in "dense srste srste-im2col srste-dense_backward srste-4:8 srste-decoupled fst "
    "fst-im2col fst_w fst_w-3:5 sdgp sdgp-all wg gg gx wx tsm tsm-interval1 meprop".split()
]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 3e-3}
VISIBLE = 5  # tolerances by which the outputs of the old and of the new weight must differ
MODES = ("train", "train-backward", "train-no_grad", "eval", "eval-inference_mode")


def checks() -> Checks:
    """Each change, with strategies, dtypes and modes drawn for each case."""
    return [(name, COUNT, partial(_check, change)) for name, change in CHANGES.items()]


def _check(change: Change, draw: random.Random) -> None:
    torch.manual_seed(draw.getrandbits(32))
    row = draw.choice(ROWS)
    dtype = draw.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16))
    autocast = dtype == torch.float32 and draw.random() < 0.3
    state = draw.getstate()

    def build() -> Net:
        draw.setstate(state)
        return Net(draw, dtype)

    net = build()
    fst.convert(net, row.build())
    new = torch.randn_like(net.conv.weight.detach())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, of its older ways
        first, second = draw.choice(MODES), draw.choice(MODES)
        _call(net, first, autocast, _input(net))
        old = net.conv.weight.detach().clone()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            changed = change(Situation(net, new, row.build(), build))
            net = changed if isinstance(changed, Net | FunctionalNet) else net
        input = _input(net)
        output, grad_output, grad_input = _call(net, second, autocast, input)
    tolerance = TOLERANCE[torch.bfloat16 if autocast else net.conv.weight.dtype]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        weight = net.conv.weight.detach()  # after the call: hooks may compute it there
    expected = _expected(row, net, input, weight, grad_output)
    what = f"{row.id}, {dtype}{', autocast' if autocast else ''}, {first} then {second}"
    stale = error(_expected(row, net, input, old, grad_output)[0], expected[0])
    assert stale > VISIBLE * tolerance, f"void: the weight has hardly changed ({what}, {stale:.1e})"
    for name, actual, right in zip(
        ("output", "grad_input"), (output, grad_input), expected, strict=True
    ):
        if actual is not None and (name == "output" or row.name != "meprop"):
            assert error(actual, right) <= tolerance, (
                f"{name} is {error(actual, right):.1e} off, the old weight's {stale:.1e} ({what})"
            )


def _input(net: Any) -> Tensor:
    input = torch.randn(2, 8, 5, 5).to(net.conv.weight.dtype)
    return input.requires_grad_()


def _call(net: Any, mode: str, autocast: bool, input: Tensor) -> tuple[Any, Tensor, Any]:
    """The output, a gradient for it, and that of the input where there is one."""
    kind, _, more = mode.partition("-")
    net.train(kind == "train")
    contexts = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with contexts.get(more, nullcontext)():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = net(input)
    grad_output = torch.randn(output.shape).to(output.dtype)
    if more != "backward":
        return output.detach(), grad_output, None
    output.backward(grad_output)
    return output.detach(), grad_output, input.grad


def _expected(
    row: Setting, net: Any, input: Tensor, weight: Tensor, grad_output: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and grad_input with `F.conv2d` in float64, on the reference's masks of ``weight``."""
    kept, arguments = net.conv.state.kept_mask, net.arguments
    size = output_size(input.shape[2:], (3, 3), arguments["stride"], 1)
    assert size == grad_output.shape[2:]
    operands = reference_operands(
        input,
        weight,
        grad_output,
        **arguments,
        strategy=row.build(),
        draws={} if kept is None else {"output": kept},
    )
    bias = net.conv.bias.detach().double()
    output = F.conv2d(input.detach().double(), operands.output_weight, bias, **arguments)
    grad_input = torch.nn.grad.conv2d_input(
        input.shape, operands.grad_input_weight, operands.grad_input_grad_output, **arguments
    )
    return output, grad_input
