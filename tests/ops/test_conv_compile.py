"""The op under torch.compile: one graph, varying sizes, random rules."""

import pytest
import torch
from torch import nn

import fst
from fst.rules.sampled import Sampled
from fst.rules.strategy import Strategy
from tests.cases import Case, case, leaves_of, run
from tests.strategy_settings import DEFAULTS, SETTINGS, quick_first, setting

COMPILED = [
    row
    for row in SETTINGS
    if (row in DEFAULTS and row.deterministic)
    or row.id in ("fst-flat", "fst-phase1", "fst-block2x2", "fst-im2col", "wx-alternating")
    or row.id in ("sdgp-channel", "sdgp-group", "srste-dense_backward", "srste-4:8")
]


QUICK = ("fst", "sdgp", "tsm")


@pytest.mark.parametrize(
    "row",
    quick_first(COMPILED, QUICK),
)
def test_compiles_in_one_graph(row):
    strategy = row.build()
    the_case = case("odd_nhwc")
    operands = the_case.operands(torch.float32)

    def function(input, weight):
        return fst.sparse_conv2d(input, weight, **the_case.arguments, strategy=strategy)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)
    results = []
    for call in (function, compiled):
        leaves = leaves_of(operands)[:2]
        output = call(*leaves)
        output.backward(operands.grad_output)
        results.append((output.detach(), leaves[0].grad, leaves[1].grad))
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager)


def test_compiles_with_a_dynamic_batch():
    """A last batch that is smaller must not break the graph."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(input, weight):
        return fst.sparse_conv2d(input, weight, padding=1, strategy="fst")

    for batch in (4, 3):
        shape = Case("dynamic", (4, 8), (5, 7), padding=1, batch=batch)
        operands = shape.operands(torch.float32)
        leaves = leaves_of(operands)[:2]
        output = compiled(*leaves)
        output.backward(operands.grad_output)
        expected = run(shape, operands, "fst")
        for a, e in zip((output, leaves[0].grad, leaves[1].grad), expected, strict=False):
            torch.testing.assert_close(a, e)


def test_compiles_for_maps_of_varying_size():
    class AtThird(Sampled):
        def draw_start(self, generator, seed, device):
            return torch.full((), 1 / 3, dtype=torch.float64, device=device)

    strategy = Strategy("test", grad_weight=AtThird())
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(input, weight):
        return fst.sparse_conv2d(input, weight, padding=1, strategy=strategy)

    for size in (16, 20):
        shape = Case("varying", (4, 8), (size, size), padding=1)
        operands = shape.operands(torch.float32)
        leaves = leaves_of(operands)[:2]
        compiled(*leaves).backward(operands.grad_output)
        expected = run(shape, operands, strategy)
        torch.testing.assert_close(leaves[1].grad, expected[2], rtol=1e-4, atol=1e-4)


RANDOM = ("sdgp-random", "srste-random", "wx-random", "fst-phase_random", "sampled", "sampled-both")


@pytest.mark.parametrize(
    "id",
    [pytest.param(id, marks=() if id in RANDOM[::3] else pytest.mark.exhaustive) for id in RANDOM],
)
def test_random_strategies_compile(id):
    """Without a generator of its own; the phase is drawn outside the graph."""
    strategy = setting(id).build()
    operands = case("basic").operands(torch.float32)
    torch._dynamo.reset()

    @torch.compile(fullgraph=id != "fst-phase_random", backend="aot_eager")
    def compiled(input, weight):
        return fst.sparse_conv2d(input, weight, padding=1, strategy=strategy)

    leaves = leaves_of(operands)[:2]
    compiled(*leaves).sum().backward()
    assert all(leaf.grad.isfinite().all() and leaf.grad.any() for leaf in leaves)


@pytest.mark.parametrize("name", ["srste", "fst", "sdgp", "mvue"])
def test_two_layers_of_dynamic_shapes_compile(name):
    """Numbers of one layer's graph must not reach the other's."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
    fst.convert(net, name)
    torch._dynamo.reset()
    compiled = torch.compile(net, dynamic=True, backend="aot_eager")
    for size in (9, 12):
        images = torch.randn(4, 8, size, size)
        torch.testing.assert_close(compiled(images), net(images))
