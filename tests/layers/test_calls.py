"""How many operators of PyTorch a training step calls: on a GPU the host must keep ahead."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fst
from fst.models import resnet18_cifar

MOST = {"fst": 50, "fst_w": 46, "srste": 30, "sdgp": 46}  # calls more than plain PyTorch's


@functools.cache
def calls_of_a_step(strategy: str) -> float:
    """ATen calls for each of the 20 convolutions, those inside of others counted too."""
    torch.manual_seed(0)
    model = resnet18_cifar(width=16)
    if strategy != "dense":
        fst.convert(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, classes = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), classes).backward()
        optimizer.step()

    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    return sum(event.name.startswith("aten::") for event in profiled.events()) / convolutions


@pytest.mark.parametrize("strategy", MOST)
def test_few_calls_more_than_plain_pytorch(strategy):
    assert calls_of_a_step(strategy) - calls_of_a_step("dense") <= MOST[strategy]
