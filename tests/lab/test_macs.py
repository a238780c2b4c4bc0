"""Multiply-adds against torch's own flop counter, real masks, and counting by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import fst
from fst.lab.macs import count_macs, total
from fst.ops.prune import prune_grad_output, prune_weight
from fst.rules.alternating import Alternating
from fst.rules.nm import NM
from fst.rules.strategy import GEMMS, Strategy
from tests.networks import attach
from tests.strategy_settings import SETTINGS, of_each_kind


class Net(nn.Module):
    """Stem, a 1x1 shortcut, a convolution that runs twice, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.body = nn.ModuleDict(
            {"shared": nn.Conv2d(8, 8, 3, padding=1), "shortcut": nn.Conv2d(8, 8, 1, stride=2)}
        )
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stem(images).relu()
        small = F.max_pool2d(self.body["shared"](features), 2, ceil_mode=True)
        small = self.body["shared"](small) + self.body["shortcut"](features)
        return self.head(small.mean((2, 3)))


def step(model: nn.Module, *size: int, needs_gradient: bool = False):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(*size, generator=generator, requires_grad=needs_gradient)
    return lambda: model(images).sum().backward()


def flops(run) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter:
        run()
    return {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_dense_counts_are_those_of_torch(needs_gradient):
    model = Net()
    run = step(model, 2, 3, 21, 13, needs_gradient=needs_gradient)
    counted = flops(run)
    convolutions = count_macs(model, run, (nn.Conv2d,))
    output, grad_input, grad_weight = (total(convolutions, gemm).dense for gemm in GEMMS)
    assert 2 * output == counted["aten.convolution"]
    assert 2 * (grad_input + grad_weight) == counted["aten.convolution_backward"]
    assert (convolutions["stem"]["grad_input"].dense > 0) == needs_gradient
    linear = count_macs(model, run, (nn.Linear,))
    sums = [total(linear, gemm) for gemm in GEMMS]
    assert 2 * sum(macs.dense for macs in sums) == counted["aten.addmm"] + counted["aten.mm"]
    assert all(macs.left == macs.dense for macs in sums)


ALTERNATING = [Alternating(pairing=p, phase=f) for p in ("row", "flat") for f in (0, 1)]
SIZES = [(1, 1), (1, 2), (3, 1), (2, 4), (5, 7), (4, 3)]


@pytest.mark.parametrize("rule", [*ALTERNATING, Alternating(block=(2, 2))], ids=str)
@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (1, 2), (3, 1), (3, 2)])
def test_alternating_leaves_what_torch_counts(rule, kernel, stride):
    """grad_weight is the one GEMM that is really cheaper, so torch's counter sees it."""
    for height, width in SIZES:
        layer = nn.Conv2d(4, 6, kernel, stride, padding=kernel // 2)
        fst.convert(layer, Strategy("mine", grad_weight=rule))
        run = step(layer, 3, 4, height * stride, width * stride)
        counted = flops(run)
        macs = count_macs(layer, run)[""]
        work = counted["aten.convolution_backward"] + counted.get("aten.mm", 0)
        assert 2 * macs["grad_weight"].left == work
        assert macs["grad_weight"].dense == 3 * height * width * layer.weight.numel()
        assert macs["grad_input"].dense == 0


def test_a_random_phase_is_counted_as_the_mean_of_both():
    layer = nn.Conv2d(4, 4, 1)
    fst.convert(layer, fst.get_strategy("fst", phase="random"))
    macs = count_macs(layer, step(layer, 1, 4, 1, 5))[""]["grad_weight"]
    assert macs.left == (3 + 2) / 2 * 16 and macs.dense == 5 * 16


@pytest.mark.parametrize("group_order", ["channel", "im2col"])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (2, 8), (3, 3)])
@pytest.mark.parametrize(("channels", "outputs", "groups"), [(7, 5, 1), (12, 18, 2), (6, 6, 6)])
def test_pruned_weights_leave_as_many_products_as_they_have_elements(
    n, m, channels, outputs, groups, group_order
):
    layer = nn.Conv2d(channels, outputs, 3, groups=groups)
    rule = NM("weight", n, m, group_order=group_order)
    strategy = Strategy("mine", output=rule, grad_input=NM("weight", n, m))
    fst.convert(layer, strategy)
    macs = count_macs(layer, step(layer, 2, channels, 5, 6, needs_gradient=True))[""]
    positions = 2 * 3 * 4
    assert [macs[gemm].dense for gemm in GEMMS] == [positions * layer.weight.numel()] * 3
    pruned = prune_weight(layer.weight, strategy, groups, torch.float32)
    assert macs["output"].left == positions * pruned.output.count_nonzero().item()
    kept = pruned.grad_input.count_nonzero().item()
    assert macs["grad_input"].left == positions * kept


@pytest.mark.parametrize(("n", "m"), [(2, 4), (3, 8)])
@pytest.mark.parametrize(("outputs", "groups"), [(7, 1), (12, 2)])
def test_pruned_output_gradients_leave_as_many_products_as_they_have_elements(
    n, m, outputs, groups
):
    rule = NM("grad_output", n, m)
    layer = nn.Conv2d(4, outputs, 3, groups=groups)
    fst.convert(layer, Strategy("mine", grad_input=rule, grad_weight=rule))
    macs = count_macs(layer, step(layer, 2, 4, 5, 7, needs_gradient=True))[""]
    grad_output = torch.randn(2, outputs, 3, 5)
    each = layer.weight[0].numel()
    for gemm in ("grad_input", "grad_weight"):
        pruned = prune_grad_output(grad_output, rule, gemm, groups, None)
        assert macs[gemm].left == pruned.count_nonzero().item() * each


def test_linear_layers_pair_the_positions_of_a_sample():
    layer = nn.Linear(4, 6)
    fst.convert(layer, "fst", include=nn.Linear)
    for size, left in (((9, 4), 9), ((2, 15, 4), 2 * 8), ((2, 3, 5, 4), 2 * 3 * 3)):
        assert count_macs(layer, step(layer, *size))[""]["grad_weight"].left == left * 24


def test_a_shared_layer_counts_each_call_with_its_own_map():
    model = Net()
    fst.convert(model, "fst")
    macs = count_macs(model, step(model, 2, 3, 12, 20))["body.shared"]
    weights = 8 * 8 * 9
    assert macs["output"] == (2 * (60 + 15) * weights, 2 * (60 + 15) * weights / 2)
    assert macs["grad_weight"].left == 2 * (30 + 9) * weights


@pytest.mark.parametrize("row", of_each_kind(SETTINGS))
def test_every_strategy_leaves_some_and_dense_gemms_leave_all(row):
    model, strategy = Net(), row.build()
    fst.convert(model, strategy, include=["stem", "body"])
    attach(model)
    counted = count_macs(model, step(model, 2, 3, 16, 16), (nn.Conv2d,))
    for gemm in GEMMS:
        macs = total(counted, gemm)
        assert 0 < macs.left <= macs.dense
        if strategy.rule(gemm) is None:
            assert macs.left == macs.dense
