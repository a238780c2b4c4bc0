"""Layers whose output and grad_input are computed with 2:4 tensor cores, as by PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fst
from fst.backends import force, registry, sources
from fst.ops import sparse24
from fst.report import describe_layer
from tests.cases import error

pytestmark = pytest.mark.system

NAMES = dict.fromkeys(("output", "grad_input"), sparse24.BACKEND)
ROUNDING = torch.finfo(torch.bfloat16).eps


@pytest.fixture(autouse=True)
def available(engine, monkeypatch) -> torch.device:
    """The backends count as runnable where the engine is the emulation."""
    if engine.type == "cpu":
        for key, backend in registry._BACKENDS.items():
            if backend.name == sparse24.BACKEND:
                runnable = {**vars(backend), "missing": lambda: ""}
                monkeypatch.setitem(registry._BACKENDS, key, registry.Backend(**runnable))
    return engine


def network(device: torch.device, strategy: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1, bias=True),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1, groups=2, bias=False),
        nn.ReLU(),
        nn.Conv2d(32, 16, 1),
    )
    model = model.to(device, memory_format=torch.channels_last)
    fst.convert(model, strategy)
    return model


def trained(model: nn.Module, steps: int = 2) -> tuple[Tensor, list[Tensor]]:
    """The last output and the weights after some steps in bfloat16."""
    device = next(model.parameters()).device
    images = torch.randn(2, 16, 9, 8, generator=torch.Generator().manual_seed(1)).to(device)
    images = images.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        with torch.autocast(device.type, torch.bfloat16):
            output = model(images)
        output.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return output.detach().float(), [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("strategy", ["fst", "fst_w", "srste", "wg"])
def test_training_is_the_same_up_to_rounding(strategy, available):
    expected, expected_weights = trained(network(available, strategy))
    model = network(available, strategy)
    with force(output=NAMES["output"]):
        if model[0].strategy.grad_input == fst.NM("weight", 2, 4):
            with force(grad_input=NAMES["grad_input"]):
                output, weights = trained(model)
        else:
            output, weights = trained(model)
    assert error(output, expected) < 4 * ROUNDING
    for weight, other in zip(weights, expected_weights, strict=True):
        assert error(weight, other) < ROUNDING
    reports = describe_layer(model[0]).gemms
    assert reports["output"].mode == "accelerated"
    assert NAMES["output"] in reports["output"].reason


def test_changed_weights_are_packed_anew(available):
    layer = nn.Conv2d(16, 16, 3, padding=1, bias=False, device=available, dtype=torch.bfloat16)
    model = nn.Sequential(layer).to(memory_format=torch.channels_last).eval()
    fst.convert(model, "fst")
    images = torch.randn(1, 16, 5, 5, device=available).bfloat16()
    images = images.contiguous(memory_format=torch.channels_last)
    with torch.no_grad(), force(output=NAMES["output"]):
        before = model(images)
        layer.weight.mul_(2)
        assert torch.equal(model(images), 2 * before)
        layer.weight.data = torch.zeros_like(layer.weight)
        assert not model(images).any()


def test_what_the_kernels_cannot_compute_is_refused_where_forced(available):
    images = torch.randn(1, 12, 5, 5, device=available).bfloat16()
    images = images.contiguous(memory_format=torch.channels_last)
    weight = torch.randn(16, 12, 3, 3, device=available).bfloat16()
    with force(output=NAMES["output"]), pytest.raises(RuntimeError, match="possible: torch"):
        fst.sparse_conv2d(images, weight, strategy="fst")
    contiguous = torch.randn(1, 16, 5, 5, device=available).bfloat16()
    with force(output=NAMES["output"]), pytest.raises(RuntimeError, match="possible: torch"):
        fst.sparse_conv2d(contiguous, weight.repeat(1, 2, 1, 1)[:, :16], strategy="fst")


def test_kept_masks_are_not_packed(available):
    """Their groups are not those that the packing kernel would choose."""
    model = network(available, "fst").eval()
    for layer in fst.sparse_layers(model).values():
        layer.keep(~layer.rule_mask())
    images = torch.randn(2, 16, 9, 8, device=available)
    images = images.contiguous(memory_format=torch.channels_last)
    with torch.no_grad(), torch.autocast(available.type, torch.bfloat16):
        expected = model(images)
        with force(**NAMES):
            assert torch.equal(model(images), expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_packs_and_convolves_without_a_break(dynamic, available):
    images = torch.randn(2, 16, 9, 8, device=available).bfloat16()
    images = images.contiguous(memory_format=torch.channels_last)
    model = network(available, "fst").bfloat16()
    with force(**NAMES):
        expected = model(images)
        expected.sum().backward()
        gradient = model[0].weight.grad.clone()
        model.zero_grad()
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        output = compiled(images)
        output.sum().backward()
    assert torch.equal(output, expected) and torch.equal(model[0].weight.grad, gradient)


def test_functional_gradients_against_float64(available):
    torch.manual_seed(0)
    images = torch.randn(2, 16, 7, 6, device=available, dtype=torch.float16)
    images = images.contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(24, 16, 3, 3, device=available)
    with force(**NAMES), torch.autocast(available.type, torch.float16):
        output = fst.sparse_conv2d(images, weight, stride=2, padding=1, strategy="fst_w")
        output.backward(torch.ones_like(output))
    exact = images.detach().double().requires_grad_()
    layout = sources.load("sparse24.layout")
    pruned = [
        layout.unpack(
            layout.pack(weight.cpu(), 1, torch.float16, transposed=t), weight.shape, transposed=t
        ).to(available, torch.float64)
        for t in (False, True)
    ]
    assert error(output, F.conv2d(exact, pruned[0], None, 2, 1)) < torch.finfo(torch.float16).eps
    F.conv2d(exact, pruned[1], None, 2, 1).sum().backward()
    assert error(images.grad, exact.grad) < torch.finfo(torch.float16).eps
