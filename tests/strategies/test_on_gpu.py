"""Strategies on a GPU: training as on a CPU, where nothing is drawn, metrics, and no waiting."""

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


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("strategy", ["dense", "srste", "fst", "sdgp", "sampled"])
def test_the_host_does_not_wait_for_the_gpu(strategy, autocast):
    net = small_net(double=False)
    fst.convert(net, strategy)
    net.cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    attach(net, optimizer)
    images = batch(dtype=torch.float32).cuda()

    def step():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = net(images).square().mean()
        loss.backward()
        optimizer.step()

    for _ in range(STEPS):  # backends are timed, and answers remembered
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
