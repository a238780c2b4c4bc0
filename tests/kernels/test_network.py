"""A converted network trained through the kernels, eager and compiled, as by the operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fst
from fst.backends import force

KERNELS = dict.fromkeys(("prune_weight", "prune_grad_output"), "triton")


def _net(strategy: fst.Strategy, device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 1, stride=2),
        nn.Conv2d(8, 8, 3, groups=2, padding=1),
    ).to(device, memory_format=torch.channels_last)
    fst.convert(net, strategy)
    return net


def _step(net: nn.Module, forward: nn.Module, images: Tensor) -> Tensor:
    net.zero_grad()
    output = forward(images)
    output.square().mean().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    return output.detach()


STRATEGIES = (
    fst.get_strategy("fst", decay=0.1),
    fst.get_strategy("sdgp", n=2, m=8, prune_weight=True),
    fst.get_strategy("srste", decay=0.1),
)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@pytest.mark.parametrize("compiled", [False, True])
def test_training_is_that_of_the_operators(strategy, compiled, device):
    nets = [_net(strategy, device) for _ in range(2)]
    forwards = list(nets)
    if compiled:
        torch._dynamo.reset()
        forwards[1] = torch.compile(nets[1], fullgraph=True, backend="aot_eager")
    for seed in range(2):
        images = torch.randn(2, 4, 5, 6, generator=torch.Generator().manual_seed(seed)).to(device)
        expected = _step(nets[0], forwards[0], images)
        with force(**KERNELS):
            actual = _step(nets[1], forwards[1], images)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    for a, e in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


@pytest.fixture
def cuda(device):
    """Where waiting can be noticed and steps can be captured."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_no_step_waits_for_the_gpu(strategy, cuda):
    net = _net(strategy, cuda)
    images = torch.randn(2, 4, 5, 6, device=cuda)
    with force(**KERNELS):
        for _ in range(2):  # compiles
            _step(net, net, images)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                _step(net, net, images)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_a_step_is_captured(strategy, cuda):
    """Replays of one CUDA graph train as eager steps do, also with other calls in between."""
    nets = [_net(strategy, cuda) for _ in range(2)]
    images = torch.randn(2, 4, 5, 6, device=cuda)
    with force(**KERNELS):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                _step(nets[1], nets[1], images)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _step(nets[1], nets[1], images)  # recorded, not run
        for _ in range(2):
            graph.replay()
            with torch.no_grad():
                nets[1].eval()(images)
            nets[1].train()
        for _ in range(3 + 2):
            _step(nets[0], nets[0], images)
    for a, e in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)
