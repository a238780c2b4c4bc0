"""Products that leave out zeros: random geometries and values, changes, resumption."""

from __future__ import annotations

import copy
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fst
from fst import backends
from fst.backends import Record, choice, timing
from fst.ops import cpp
from tests.campaign.shared import Checks, assert_equal_weights, train
from tests.cases import (
    Case,
    Operands,
    error,
    leaves_of,
    random_case,
    random_layout,
    without_onednn,
)
from tests.oracle.conv import reference_conv2d
from tests.strategy_settings import DEFAULTS

PAIRS = (
    ("output", "zeros_weight"),
    ("output", "zeros_input"),
    ("grad_input", "zeros_weight"),
    ("grad_input", "zeros_grad_output"),
    ("grad_weight", "zeros_input"),
    ("grad_weight", "zeros_grad_output"),
)
FACTORS = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
GEMMS = tuple(FACTORS)
NAMES = ("input", "weight", "grad_output")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def checks() -> Checks:
    """Each backend by itself; weights that change; trainings that resume."""
    found: Checks = []
    if not cpp.missing():
        for gemm, name in PAIRS:
            found.append((f"exact-{gemm}-{name}", 80, partial(_check_exact, gemm, name)))
            found.append((f"wild-{gemm}-{name}", 40, partial(_check_wild, gemm, name)))
        found.append(("changed", 40, _check_changed))
    return [*found, ("resumed", 30, _check_resumed)]


# ---------------------------------------------------------------- values


def _some(draw: random.Random, x: Tensor, value: float) -> Tensor:
    return x.masked_fill(torch.rand(x.shape) < draw.choice((0.25, 0.5, 0.9)), value)


FAMILIES: dict[str, Callable[[random.Random, Tensor], Tensor]] = {
    "none": lambda draw, x: x,
    "zeros": lambda draw, x: _some(draw, x, 0.0),
    "negative": lambda draw, x: _some(draw, x, -0.0),
    "all": lambda draw, x: torch.zeros_like(x),
    "relu": lambda draw, x: x.relu(),
    "subnormal": lambda draw, x: x * (torch.finfo(x.dtype).tiny / 4),
}


def _operands(
    draw: random.Random, shape: Case, dtype: torch.dtype, families: list[str]
) -> Operands:
    """The operands of a convolution, each of a family of values and in a layout of its own."""
    (inputs, outputs), made = shape.channels, {}
    sizes = {
        "input": (shape.batch, inputs, *shape.size),
        "weight": (outputs, inputs // shape.groups, *shape.kernel),
        "grad_output": (shape.batch, outputs, *shape.output_size),
    }
    subnormal = False  # of one operand at most, or the products are nothing but rounding
    for name, size in sizes.items():
        family = draw.choice([f for f in families if not (subnormal and f == "subnormal")])
        subnormal |= family == "subnormal"
        values = FAMILIES[family](draw, torch.randn(size).to(dtype))
        made[name] = random_layout(draw, values)
    bias = torch.randn(outputs).to(dtype) if shape.bias and not subnormal else None
    return Operands(made["input"], made["weight"], bias, made["grad_output"])


def _product(shape: Case, operands: Operands, gemm: str, name: str) -> tuple[Tensor, str]:
    """A product by a backend, where it takes the operands, and the backend that computed it."""
    record = Record()
    leaves = leaves_of(operands)
    with (
        without_onednn(operands.weight.itemsize == 2 or shape.size[1] < shape.stride[1]),
        choice.recording(record),
        backends.prefer(**{gemm: name}),
    ):
        output = fst.sparse_conv2d(*leaves, **shape.arguments, strategy="sparsetrain")
        output.backward(operands.grad_output)
    found = (output.detach(), leaves[0].grad, leaves[1].grad)
    return found[GEMMS.index(gemm)], record.decisions[gemm].backend


def _check_exact(gemm: str, name: str, draw: random.Random) -> None:
    """An error of at most twice torch's, and one rounding; refusals only of few channels."""
    torch.manual_seed(draw.getrandbits(32))
    shape, dtype = random_case(draw), draw.choice(DTYPES)
    operands = _operands(draw, shape, dtype, list(FAMILIES))
    found, ran = _product(shape, operands, gemm, name)
    least = min(shape.channels) // shape.groups
    few = least < 4 and (shape.groups > 1 or name != "zeros_weight")
    assert (ran == name) != few, f"{ran} computed {gemm} of {shape}"
    exact = reference_conv2d(
        *(operands.input, operands.weight, operands.grad_output),
        bias=operands.bias,
        **shape.arguments,
        strategy=fst.get_strategy("dense"),
    )[GEMMS.index(gemm)]
    same, _ = _product(shape, operands, gemm, "dense")
    unit = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # of subnormal results
    off, torchs = ((x.double() - exact).norm() for x in (found, same))
    allowed = 2 * torchs + torch.finfo(dtype).eps * exact.norm() + unit * exact.numel() ** 0.5
    assert off <= allowed, f"{off:.2g} > {allowed:.2g}: {dtype}, {shape}"


def _check_wild(gemm: str, name: str, draw: random.Random) -> None:
    """NaN and infinities come out wherever a non-zero multiplies them, and nowhere else."""
    torch.manual_seed(draw.getrandbits(32))
    shape = replace(random_case(draw), bias=False)
    operands = _operands(draw, shape, draw.choice(DTYPES), ["none", "zeros", "negative", "relu"])
    changed = draw.choice(FACTORS[gemm])
    values = getattr(operands, changed)
    for _ in range(draw.randint(1, 3)):
        place = tuple(draw.randrange(n) for n in values.shape)
        values[place] = draw.choice((float("nan"), float("inf"), float("-inf")))
    found, ran = _product(shape, operands, gemm, name)
    if ran != name:
        return
    infinite, skipped = ~found.isfinite(), name.removeprefix("zeros_")
    wanted = _reached(shape, operands, gemm, skipped, changed)
    assert infinite[wanted].all(), f"what is not finite does not come out: {changed}, {shape}"
    if changed == skipped == "weight":  # beside the image it multiplies zeros too
        wild = ~operands.weight.isfinite()
        if gemm == "output":
            channels = wild.flatten(1).any(1)
        else:
            channels = wild.unflatten(0, (shape.groups, -1)).any(1).flatten(2).any(2).flatten()
        wanted = channels.view(1, -1, 1, 1).expand_as(infinite)
    assert wanted[infinite].all(), f"what is finite does not come out: {changed}, {shape}"


def _reached(shape: Case, operands: Operands, gemm: str, skipped: str, changed: str) -> Tensor:
    """Which results a number that is not finite reaches."""
    counts = {n: torch.ones_like(getattr(operands, n), dtype=torch.float64) for n in NAMES}
    counts[skipped] = (getattr(operands, skipped) != 0).double()
    counts[changed] = counts[changed] * ~getattr(operands, changed).isfinite()
    leaves = [counts["input"].requires_grad_(), counts["weight"].requires_grad_()]
    output = F.conv2d(*leaves, **shape.arguments)
    output.backward(counts["grad_output"])
    return (output.detach(), leaves[0].grad, leaves[1].grad)[GEMMS.index(gemm)] > 0.5


# ---------------------------------------------------------------- changes and resumption


def _check_changed(draw: random.Random) -> None:
    """A weight that changes behind autograd's back gives what the dense products give."""
    torch.manual_seed(draw.getrandbits(32))
    shape = replace(random_case(draw), bias=False)
    operands = _operands(draw, shape, torch.float32, ["none", "zeros", "relu"])
    new = torch.randn_like(operands.weight) * (torch.rand(operands.weight.shape) < 0.5)
    strategy = draw.choice(("srste", "fst_w", "sparsetrain", "sdgp"))
    names = dict(draw.sample(PAIRS, 3))
    results = []
    for chosen in (names, dict.fromkeys(GEMMS, "dense")):
        input, weight, _ = leaves_of(operands)
        with backends.prefer(**chosen):
            output = fst.sparse_conv2d(input, weight, **shape.arguments, strategy=strategy)
            weight.data.copy_(new)
            output.backward(operands.grad_output)
        results.append((output.detach(), input.grad, weight.grad))
    for mine, other in zip(*results, strict=True):
        assert error(mine, other) <= 1e-5, f"{strategy} by {names}, {shape}"


def _times(draw: random.Random) -> Callable[..., tuple[dict[str, float], dict[str, Exception]]]:
    """Random times in the place of measured ones."""

    def race(functions: dict[str, object], *_: object) -> tuple[dict[str, float], dict]:
        return {name: draw.uniform(1, 9) for name in functions}, {}

    return race


def _check_resumed(draw: random.Random) -> None:
    """Saved in the middle it ends with the same weights, whatever is measured and drawn then."""
    row = draw.choice([r for r in DEFAULTS if r.build().schedule is None])
    seed, width, size = draw.getrandbits(32), draw.choice((4, 8, 12)), draw.randint(5, 9)
    half, end = draw.randint(1, 20), draw.randint(21, 40)
    nets: list[nn.Module] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("whole", "resumed"):
            torch.manual_seed(seed)
            net = nn.Sequential(
                nn.Conv2d(4, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 8, 3, padding=1)
            )
            fst.convert(net, row.build())
            fst.seed_random_rules(net, 0)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
            place = {"FST_AUTOTUNE": "1", "FST_CACHE_DIR": f"{folder}/{name}"}
            given = ((3, 4, size, size), torch.float32)
            backends.forget_decisions()
            with (
                mock.patch.dict(os.environ, place),
                mock.patch.multiple(choice, LEAST_GAIN=1.0, LEAST_SAVED=0.0),
                mock.patch.object(timing, "race", _times(draw)),
            ):
                if name == "whole":
                    train(net, optimizer, range(half), *given)
                    states = net.state_dict(), optimizer.state_dict(), fst.sparsity_state(net)
                    states = copy.deepcopy(states)
                else:
                    net.load_state_dict(states[0])
                    optimizer.load_state_dict(states[1])
                    fst.load_sparsity_state(net, states[2])
                train(net, optimizer, range(half, end), *given)
            nets.append(net)
    backends.forget_decisions()
    assert_equal_weights(*nets, f"of {row.id} after {half} of {end} steps")
