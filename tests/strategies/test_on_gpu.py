"""Strategies on a GPU: training as on a CPU, metrics, no waiting, CUDA graphs."""

import copy
import math

import pytest
import torch

import fst
from tests.networks import assert_close, attach, batch, optimizer_for, small_net
from tests.strategy_settings import KINDS

STEPS = 7  # into the second epoch of `attach`
DRAWN_AT_THE_START = ("rigl",)  # on the device
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def training(row, device):
    net = small_net()
    fst.convert(net, row.build())
    fst.seed_random_rules(net, 1)
    net.to(device)
    optimizer = optimizer_for(net, lr=1e-3)
    attach(net, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        net(batch(step).to(device)).square().mean().backward()
        optimizer.step()
    return net


@pytest.mark.parametrize("row", KINDS, ids=lambda row: row.id)
def test_a_gpu_trains_as_a_cpu_does(row):
    net = training(row, "cuda")
    assert all(math.isfinite(value) for value in fst.metrics(net).values())
    weights = {name: weight.detach().cpu() for name, weight in net.named_parameters()}
    assert all(weight.isfinite().all() for weight in weights.values())
    folded = fst.fold(copy.deepcopy(net)).cpu()
    assert folded(batch()).isfinite().all()
    if row.deterministic and row.name not in DRAWN_AT_THE_START:
        on_cpu = training(row, "cpu")
        expected = {name: weight.detach() for name, weight in on_cpu.named_parameters()}
        assert_close(weights, expected, tolerance=1e-8)


def converted(strategy, **options):
    net = small_net(double=False)
    fst.convert(net, strategy, **options)
    return net.cuda()


def step_of(net, autocast):
    """A training step of ``net``, each time on the same images."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    attach(net, optimizer)
    images = batch(dtype=torch.float32).cuda()

    def step():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = net(images).square().mean()
        loss.backward()
        optimizer.step()

    return step


def captured(step):
    """The step as a CUDA graph, after `STEPS` warm-up steps on a stream of their own."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(STEPS):  # backends are timed, and answers remembered
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("strategy", ["dense", "srste", "fst", "sdgp", "sampled"])
def test_the_host_does_not_wait_for_the_gpu(strategy, autocast):
    step = step_of(converted(strategy), autocast)
    for _ in range(STEPS):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("strategy", ["dense", "srste", "fst", "fst_w", "sdgp"])
def test_a_captured_step_trains_as_others_do(strategy, autocast):
    nets = [converted(strategy) for _ in range(2)]
    step = step_of(nets[0], autocast)
    for _ in range(STEPS + 3):
        step()
    graph = captured(step_of(nets[1], autocast))
    for _ in range(3):
        graph.replay()
    made, expected = ({n: w.detach() for n, w in net.named_parameters()} for net in reversed(nets))
    assert_close(made, expected, tolerance=1e-2 if autocast else 1e-4)


@pytest.mark.parametrize("strategy", ["rigl", "tsm", "acdc", "resprop", "sdgp,rule=random"])
def test_what_changes_at_each_step_is_not_captured(strategy):
    net = converted(strategy)
    fst.seed_random_rules(net, 1)
    with pytest.raises(RuntimeError, match="CUDA graph"):
        captured(step_of(net, autocast=False))
