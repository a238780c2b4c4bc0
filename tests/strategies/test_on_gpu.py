"""Every kind of strategy on a GPU: training as on a CPU, where nothing is drawn, and metrics."""

import copy
import math

import pytest
import torch

import fst
from tests.networks import assert_close, attach, batch, optimizer_for, small_net
from tests.strategy_settings import KINDS

STEPS = 7  # into the second epoch of `attach`
DRAWN_AT_THE_START = ("rigl",)  # on the device


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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
