"""The whole op by the backends that leave out zeros, against the float64 reference."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from hypothesis import given, settings
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import fst
from fst.backends import Record, registry
from fst.ops import cpp
from fst.ops.geometry import Geometry, gradients
from fst.ops.operands import GradWeight, Zeros
from tests.cases import (
    CASES,
    RANDOMS,
    Case,
    Operands,
    case,
    error,
    leaves_of,
    random_case,
    random_layout,
    run,
    without_onednn,
)
from tests.oracle.conv import reference_conv2d, reference_linear
from tests.strategy_settings import setting

pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=f"the C++ kernels: {cpp.missing()}")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPERANDS = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
GEMMS = tuple(OPERANDS)
NAMES = ("input", "weight", "grad_output")
DENSE = dict.fromkeys(GEMMS, "dense")
BACKENDS = (  # each of an operation once
    {"output": "zeros_weight", "grad_input": "zeros_weight", "grad_weight": "zeros_input"},
    {"output": "zeros_input", "grad_input": "zeros_grad_output"},
    {"grad_weight": "zeros_grad_output"},
)
PAIRS = [(gemm, name) for names in BACKENDS for gemm, name in names.items()]
EVERYWHERE = ("srste", "sparsetrain")  # S(W), S(Wᵀ), and dense operands
ELSEWHERE = ("fst", "fst_w", "sdgp", "wg", "tsm", "mvue", "sampled")
HARD = ("odd_nhwc", "grouped_stride2", "mixed", "wide_channels")
SETTINGS = [(name, c) for name in EVERYWHERE for c in CASES]
SETTINGS += [(name, case(id)) for name in ELSEWHERE for id in HARD]
PLAIN = Case("plain", (8, 8), (6, 6), padding=1, batch=2)


def operands_of(the_case: Case, dtype: torch.dtype = torch.float32) -> Operands:
    """Half of the numbers of both maps are zero."""
    found = the_case.operands(dtype)
    torch.manual_seed(0)
    found.input = found.input.relu()
    found.grad_output = found.grad_output * (torch.rand(found.grad_output.shape) < 0.5)
    return found


def computed(the_case: Case, operands: Operands, strategy, names: dict[str, str]):
    """Results of the op, and by which backend each product was computed."""
    record = Record()
    plain = without_onednn(operands.weight.itemsize == 2 or the_case.is_narrow)
    noted = patch("fst.api.functional.Record", return_value=record)
    with noted, fst.backends.prefer(**names), plain:
        found = run(the_case, operands, strategy)
    return found, {gemm: record.decisions[gemm].backend for gemm in GEMMS}


def takes(gemm: str, name: str, the_case: Case, strategy: fst.Strategy) -> bool:
    """True unless the backend must refuse: few channels, and rules that leave positions out."""
    least = min(the_case.channels) // the_case.groups
    if name == "zeros_weight":
        return the_case.groups == 1 or least >= 4
    rule = strategy.grad_weight if gemm == "grad_weight" else None
    positions = rule is not None and rule.operand == "input"
    rows, columns = the_case.output_size
    if positions:
        lattices = rule.kept_positions(rows, columns, 0)
        kept = 0 if lattices is None else sum(math.prod(of.size(rows, columns)) for of in lattices)
        positions = kept < rows * columns
    return least >= 4 and not positions


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "the_case"), SETTINGS)
def test_products_are_as_exact_as_torchs(name, the_case, dtype):
    """An error of at most twice torch's, and one rounding of the result."""
    row = setting(name)
    strategy, operands = row.build(), operands_of(the_case, dtype)
    of_lists = fst.get_strategy("dense")  # whoever takes all positions is exact
    exact = None
    if not row.drawn:
        exact = reference_conv2d(
            *(operands.input, operands.weight, operands.grad_output),
            bias=operands.bias,
            **the_case.arguments,
            strategy=of_lists if name == "sampled" else strategy,
            draws={"phase": 0},
        )
    for last in (False, True):
        memory = torch.channels_last if last else torch.contiguous_format
        laid_out = {
            n: getattr(operands, n).contiguous(memory_format=memory)
            for n in ("input", "weight", "grad_output")
        }
        given = replace(operands, **laid_out)
        same, _ = computed(the_case, given, strategy, DENSE)
        for names in BACKENDS:
            found, ran = computed(the_case, given, strategy, names)
            for index, gemm in enumerate(GEMMS):
                if gemm not in names:
                    continue
                wanted = takes(gemm, names[gemm], the_case, strategy)
                assert (ran[gemm] == names[gemm]) == wanted, ran
                if not wanted:
                    continue
                assert found[index].dtype == same[index].dtype
                eps = torch.finfo(dtype).eps
                if exact is None:
                    assert error(found[index], same[index]) <= 3 * eps
                else:
                    torchs = error(same[index], exact[index])
                    assert error(found[index], exact[index]) <= 2 * torchs + eps


@pytest.mark.parametrize("name", ["srste", "sparsetrain"])
@pytest.mark.parametrize(
    ("kernel", "dilation", "groups"),
    [((2, 2), 1, 1), ((4, 3), 1, 2), ((3, 2), (2, 3), 1), ((1, 4), 1, 1)],
)
def test_layers_with_asymmetric_padding(kernel, dilation, groups, name):
    shape = dict(kernel=kernel, dilation=dilation, groups=groups, padding="same", bias=True)
    the_case = Case("same", (8, 12), (7, 9), **shape)
    operands = operands_of(the_case)
    # a layer's decay waits for the optimizer's step
    strategy = fst.get_strategy(name, **({"decay": 0.0} if name == "srste" else {}))
    exact = reference_conv2d(
        *(operands.input, operands.weight, operands.grad_output),
        bias=operands.bias,
        **the_case.arguments,
        strategy=strategy,
    )
    for names in BACKENDS:
        layer = nn.Conv2d(8, 12, kernel, padding="same", dilation=dilation, groups=groups)
        net = nn.Sequential(layer)
        fst.convert(net, strategy)
        layer.weight.data.copy_(operands.weight)
        layer.bias.data.copy_(operands.bias)
        input = operands.input.clone().requires_grad_()
        with fst.backends.force(**names):
            output = net(input)
            output.backward(operands.grad_output)
        found = (output, input.grad, layer.weight.grad, layer.bias.grad)
        for mine, other in zip(found, exact, strict=True):
            assert error(mine.detach(), other) <= 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 12), (3, 7, 12), (2, 3, 4, 12), (7, 9)], ids=str)
@pytest.mark.parametrize("name", ["srste", "sparsetrain"])
def test_linear_layers(name, shape, dtype):
    strategy = fst.get_strategy(name)
    input = torch.randn(shape).relu().to(dtype)
    weight, bias = torch.randn(10, shape[-1]).to(dtype), torch.randn(10).to(dtype)
    grad_output = (torch.randn(*shape[:-1], 10) * (torch.rand(*shape[:-1], 10) < 0.5)).to(dtype)
    exact = reference_linear(input, weight, grad_output, bias=bias, strategy=strategy)
    for names in BACKENDS:
        leaves = [t.clone().requires_grad_() for t in (input, weight, bias)]
        with fst.backends.force(**names):
            output = fst.sparse_linear(*leaves, strategy=strategy)
            output.backward(grad_output)
        for mine, other in zip((output, *(x.grad for x in leaves)), exact, strict=True):
            assert error(mine.detach(), other) <= 2 * torch.finfo(dtype).eps


def test_a_bias_that_is_not_contiguous():
    bias = torch.ones(1).expand(8)
    operands = operands_of(PLAIN)
    expected = F.conv2d(operands.input, operands.weight, bias, padding=1)
    for name in ("zeros_weight", "zeros_input"):
        with fst.backends.force(output=name):
            found = fst.sparse_conv2d(
                operands.input, operands.weight, bias, padding=1, strategy="sparsetrain"
            )
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("names", BACKENDS, ids=str)
@pytest.mark.parametrize("name", ["srste", "sdgp", "sparsetrain", "sampled"])
def test_an_empty_batch(name, names):
    empty = replace(PLAIN, batch=0)
    found, _ = computed(empty, empty.operands(torch.float32), name, names)
    assert [tuple(t.shape) for t in found[:3]] == [(0, 8, 6, 6), (0, 8, 6, 6), (8, 8, 3, 3)]
    if name != "srste":  # whose decay is there without data
        assert not found[2].any()


@pytest.mark.parametrize("the_case", [c for c in CASES if c.id in HARD])
def test_gradients_are_those_of_the_output(the_case):
    """Y is linear in X and in W: ⟨dY, Y(V)⟩ = ⟨dX, V⟩ for any V."""
    operands = replace(operands_of(the_case), bias=None)
    torch.manual_seed(1)
    input = torch.randn_like(operands.input).relu()
    weight = torch.randn_like(operands.weight)
    for names in BACKENDS:
        names = {"output": "zeros_weight"} | names
        found = computed(the_case, operands, "sparsetrain", names)[0]
        for gradient, moved, changed in (
            (found[1], input, replace(operands, input=input)),
            (found[2], weight, replace(operands, weight=weight)),
        ):
            output = computed(the_case, changed, "sparsetrain", names)[0][0]
            left = (output.double() * operands.grad_output).sum()
            right = (gradient.double() * moved).sum()
            size = output.double().norm() * operands.grad_output.double().norm()
            assert abs(left - right) <= 1e-6 * size


# ---------------------------------------------------------------- any shape and values


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


def random_operands(
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


def _product(the_case: Case, operands: Operands, gemm: str, name: str) -> tuple[Tensor, str]:
    """A product by a backend, where it takes the operands, and the backend that computed it."""
    found, ran = computed(the_case, operands, "sparsetrain", {gemm: name})
    return found[GEMMS.index(gemm)], ran[gemm]


@pytest.mark.parametrize(("gemm", "name"), PAIRS)
@settings(max_examples=20)
@given(draw=RANDOMS)
def test_random_products(gemm: str, name: str, draw: random.Random) -> None:
    """An error of at most twice torch's, and one rounding; refusals only of few channels."""
    torch.manual_seed(draw.getrandbits(32))
    shape, dtype = random_case(draw), draw.choice(DTYPES)
    operands = random_operands(draw, shape, dtype, list(FAMILIES))
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


# ---------------------------------------------------------------- what is not finite


def _reached(shape: Case, operands: Operands, gemm: str, skipped: str, changed: str) -> Tensor:
    """Which results a number that is not finite reaches."""
    counts = {n: torch.ones_like(getattr(operands, n), dtype=torch.float64) for n in NAMES}
    counts[skipped] = (getattr(operands, skipped) != 0).double()
    counts[changed] = counts[changed] * ~getattr(operands, changed).isfinite()
    leaves = [counts["input"].requires_grad_(), counts["weight"].requires_grad_()]
    output = F.conv2d(*leaves, **shape.arguments)
    output.backward(counts["grad_output"])
    return (output.detach(), leaves[0].grad, leaves[1].grad)[GEMMS.index(gemm)] > 0.5


@pytest.mark.parametrize(("gemm", "name"), PAIRS)
@given(draw=RANDOMS)
def test_what_is_not_finite_reaches_what_a_nonzero_multiplies(
    gemm: str, name: str, draw: random.Random
) -> None:
    """NaN and infinities come out wherever a non-zero multiplies them, and nowhere else."""
    torch.manual_seed(draw.getrandbits(32))
    shape = replace(random_case(draw), bias=False)
    operands = random_operands(
        draw, shape, draw.choice(DTYPES), ["none", "zeros", "negative", "relu"]
    )
    changed = draw.choice(OPERANDS[gemm])
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
    uneven = shape.padding == "same" and any(
        d * (k - 1) % 2 for k, d in zip(shape.kernel, shape.dilation, strict=True)
    )
    if not uneven:  # there the image is padded first, as by torch, and its zeros are multiplied
        assert wanted[infinite].all(), f"what is finite does not come out: {changed}, {shape}"


@pytest.mark.parametrize("names", BACKENDS, ids=str)
@pytest.mark.parametrize("name", ["srste", "sparsetrain"])
def test_a_gradient_scaler_finds_an_infinite_gradient(name, names):
    net = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    fst.convert(net, name)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = [p.detach().clone() for p in net.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1)
    with fst.backends.force(**names):
        loss = net(torch.randn(2, 8, 8, 8)).square().sum()
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**126
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))


# ---------------------------------------------------------------- changes, threads, graphs


@pytest.mark.parametrize("names", [*BACKENDS, DENSE], ids=str)
@pytest.mark.parametrize("name", ["srste", "sparsetrain"])
def test_a_weight_that_changes_before_the_backward_pass(name, names):
    """Autograd sees a change in place."""
    input, weight, _ = leaves_of(operands_of(PLAIN))
    with fst.backends.force(**names):
        output = fst.sparse_conv2d(input, weight, padding=1, strategy=name)
        with torch.no_grad():
            weight.neg_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@given(RANDOMS)
def test_a_weight_that_changes_behind_autograds_back(draw: random.Random) -> None:
    """The result is that of the dense products."""
    torch.manual_seed(draw.getrandbits(32))
    shape = replace(random_case(draw), bias=False)
    operands = random_operands(draw, shape, torch.float32, ["none", "zeros", "relu"])
    new = torch.randn_like(operands.weight) * (torch.rand(operands.weight.shape) < 0.5)
    strategy = draw.choice(("srste", "fst_w", "sparsetrain", "sdgp"))
    names = dict(draw.sample(PAIRS, 3))
    results = []
    for chosen in (names, DENSE):
        input, weight, _ = leaves_of(operands)
        with fst.backends.prefer(**chosen):
            output = fst.sparse_conv2d(input, weight, **shape.arguments, strategy=strategy)
            weight.data.copy_(new)
            output.backward(operands.grad_output)
        results.append((output.detach(), input.grad, weight.grad))
    for mine, other in zip(*results, strict=True):
        assert error(mine, other) <= 1e-5, f"{strategy} by {names}, {shape}"


@pytest.mark.parametrize(("gemm", "backend"), PAIRS)
@pytest.mark.parametrize(
    "name",
    ["srste", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("fst", "sparsetrain"))],
)
def test_one_graph_under_torch_compile(name, gemm, backend, monkeypatch):
    monkeypatch.delenv("FST_AUTOTUNE")
    strategy = fst.get_strategy(name)
    if not takes(gemm, backend, PLAIN, strategy):
        pytest.skip("the rule leaves positions out, and the backend takes all")
    operands, called = operands_of(PLAIN), set()

    def function(input: Tensor, weight: Tensor) -> Tensor:
        return fst.sparse_conv2d(input, weight, padding=1, strategy=strategy)

    def noted(graph: torch.fx.GraphModule, _: object):
        called.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=noted))
    results = []
    with fst.backends.force(**{gemm: backend}):
        for call in (function, compiled):
            input, weight, _ = leaves_of(operands)
            output = call(input, weight)
            output.backward(operands.grad_output)
            results.append((output.detach(), input.grad, weight.grad))
    kind = "zeros" if backend == "zeros_weight" else "maps"
    assert f"fst.{kind}_{gemm}_cpp.default" in called
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager)


def test_calls_from_many_threads():
    operands = [operands_of(Case("any", (8, 8), (6, 4 + i), padding=1)) for i in range(6)]
    cases = [Case("any", (8, 8), (6, 4 + i), padding=1) for i in range(6)]
    for names in BACKENDS:
        with fst.backends.force(**names):

            def step(i: int) -> tuple[Tensor, ...]:
                return run(cases[i % 6], operands[i % 6], "srste")[:3]

            wanted = [step(i) for i in range(6)]
            with ThreadPoolExecutor(4) as pool:
                found = list(pool.map(step, range(24)))
        for i, results in enumerate(found):
            assert all(torch.equal(a, b) for a, b in zip(results, wanted[i % 6], strict=True))


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", ["zeros_input", "zeros_grad_output", "dense"])
def test_every_backend_of_grad_weight_is_timed_with_the_grad_input_that_is_wanted_too(name, joint):
    """The library computes both gradients in one call, and less time than one after the other."""
    input, weight = torch.randn(2, 8, 6, 6).relu(), torch.randn(8, 8, 3, 3)
    grad_output, geometry = torch.randn(2, 8, 6, 6).relu(), Geometry((1, 1), (1, 1), (1, 1), 1)
    zeros = Zeros(input=0.5, grad_output=0.5)
    operands = GradWeight(weight, geometry, grad_output, input, joint=joint, zeros=zeros)
    backend = registry.backend("grad_weight", name)
    grad_input, grad_weight, _ = backend.plan(operands)(operands)
    maps = grad_output, input, weight
    expected = gradients(*maps, geometry, (True, True, False))(*maps)
    torch.testing.assert_close(grad_weight, expected[1], rtol=1e-4, atol=1e-4)
    assert (grad_input is not None) == joint
    if joint:
        torch.testing.assert_close(grad_input, expected[0], rtol=1e-4, atol=1e-4)
        alone = replace(operands, joint=False)
        assert name == "dense" or backend.cost(alone) < backend.cost(operands)
