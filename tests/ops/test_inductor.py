"""torch.compile with its default backend, where a C++ compiler is at hand."""

import shutil

import pytest
import torch

import fst

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
    ),
]


def _assert_close(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4 * e.abs().max().item())


def test_inductor_computes_what_eager_does():
    strategies = [fst.get_strategy("fst"), fst.get_strategy("sdgp", n=2, m=8)]

    def network(images, weight):
        for strategy in strategies:
            images = fst.sparse_conv2d(images, weight, padding=1, strategy=strategy)
        return images

    torch.manual_seed(0)
    images = torch.randn(2, 16, 8, 8, requires_grad=True)
    weight = torch.randn(16, 16, 3, 3).mul_(0.1).requires_grad_()

    def run(function):
        output = function(images, weight)
        return output, *torch.autograd.grad(output.square().sum(), (images, weight))

    expected = run(network)
    torch._dynamo.reset()
    actual = run(torch.compile(network, fullgraph=True))
    _assert_close(actual, expected)


@pytest.mark.exhaustive
def test_inductor_takes_the_block_of_a_vit():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    block = timm.models.vision_transformer.Block(32, num_heads=2)
    fst.convert(block, "fst", layers="linear")
    tokens = torch.randn(2, 17, 32, requires_grad=True)

    def run(function):
        output = function(tokens)
        return output, *torch.autograd.grad(output.square().sum(), (tokens, *block.parameters()))

    expected = run(block)
    torch._dynamo.reset()
    _assert_close(run(torch.compile(block, fullgraph=True)), expected)
