"""Multiply-adds against torch's own flop counter, real masks, and counting by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import fst
from fst.lab.analysis import MacReport, count_macs
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


def gemms(report: MacReport, name: str):
    return next(layer for layer in report.layers if layer.name == name).gemms


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_dense_counts_are_those_of_torch(needs_gradient):
    model = Net()
    run = step(model, 2, 3, 21, 13, needs_gradient=needs_gradient)
    counted = flops(run)
    report = count_macs(model, run)
    backward = report.total("grad_input").dense + report.total("grad_weight").dense
    assert 2 * report.total("output").dense == counted["aten.convolution"]
    assert 2 * backward == counted["aten.convolution_backward"]
    linear = report.total(kind="linear")
    assert 2 * linear.dense == counted["aten.addmm"] + counted["aten.mm"]
    assert report.total(kind=None).dense == report.total().dense + linear.dense
    assert report.total().left == report.total().dense and report.total().sparse == 0
    assert gemms(report, "stem")["grad_input"].mode == (
        "dense" if needs_gradient else "not computed"
    )


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
        report = gemms(count_macs(layer, run), "")
        work = counted["aten.convolution_backward"] + counted.get("aten.mm", 0)
        assert 2 * report["grad_weight"].left == work
        assert report["grad_weight"].dense == 3 * height * width * layer.weight.numel()
        assert report["grad_input"].mode == "not computed"
        pairs = height * width > 1 and (width > 1 or rule.pairing == "flat" or rule.block == (2, 2))
        assert report["grad_weight"].mode == ("accelerated" if pairs else "dense")


def test_a_map_without_neighbours_has_nothing_to_pair():
    layer = nn.Conv2d(4, 4, 3, padding=1)
    fst.convert(layer, "fst")
    macs = gemms(count_macs(layer, step(layer, 2, 4, 1, 1)), "")["grad_weight"]
    assert macs.mode == "dense" and macs.left == macs.dense and "map is too small" in macs.reason


def test_a_random_phase_is_counted_as_the_mean_of_both():
    layer = nn.Conv2d(4, 4, 1)
    fst.convert(layer, fst.get_strategy("fst", phase="random"))
    macs = gemms(count_macs(layer, step(layer, 1, 4, 1, 5)), "")["grad_weight"]
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
    report = gemms(count_macs(layer, step(layer, 2, channels, 5, 6, needs_gradient=True)), "")
    positions = 2 * 3 * 4
    dense = positions * layer.weight.numel()
    assert [report[gemm].dense for gemm in GEMMS] == [dense] * 3
    pruned = prune_weight(layer.weight, strategy, groups, torch.float32)
    assert report["output"].left == positions * pruned.output.count_nonzero().item()
    kept = pruned.grad_input.count_nonzero().item()
    assert report["grad_input"].left == positions * kept
    assert report["grad_weight"].mode == "dense"
    assert (report["output"].mode == "simulated") == (report["output"].left < dense)


@pytest.mark.parametrize(("n", "m"), [(2, 4), (3, 8)])
@pytest.mark.parametrize(("outputs", "groups"), [(7, 1), (12, 2)])
def test_pruned_output_gradients_leave_as_many_products_as_they_have_elements(
    n, m, outputs, groups
):
    rule = NM("grad_output", n, m)
    layer = nn.Conv2d(4, outputs, 3, groups=groups)
    fst.convert(layer, Strategy("mine", grad_input=rule, grad_weight=rule))
    report = gemms(count_macs(layer, step(layer, 2, 4, 5, 7, needs_gradient=True)), "")
    grad_output = torch.randn(2, outputs, 3, 5)
    each = layer.weight[0].numel()
    for gemm in ("grad_input", "grad_weight"):
        pruned = prune_grad_output(grad_output, rule, gemm, groups, None)
        assert report[gemm].left == pruned.count_nonzero().item() * each
        assert report[gemm].mode == "simulated"


def test_pruned_inputs_are_counted_along_the_positions():
    layer = nn.Conv2d(4, 6, 3)
    fst.convert(layer, Strategy("mine", grad_weight=NM("input", 2, 4)))
    macs = gemms(count_macs(layer, step(layer, 3, 4, 5, 5)), "")["grad_weight"]
    assert (macs.dense, macs.left) == (3 * 9 * 216, 3 * 5 * 216)


def test_linear_layers_pair_the_positions_of_a_sample():
    layer = nn.Linear(4, 6)
    fst.convert(layer, "fst", include=nn.Linear)
    flat = gemms(count_macs(layer, step(layer, 9, 4)), "")["grad_weight"]
    assert flat.mode == "dense" and flat.left == flat.dense == 9 * 24
    tokens = count_macs(layer, step(layer, 2, 15, 4))
    assert tokens.layers[0].maps == ((2, 1, 15),)
    assert gemms(tokens, "")["grad_weight"].left == 2 * 8 * 24
    maps = count_macs(layer, step(layer, 2, 3, 5, 4))
    assert maps.layers[0].maps == ((2, 3, 5),)
    assert gemms(maps, "")["grad_weight"].left == 2 * 3 * 3 * 24


def test_a_shared_layer_counts_each_call_with_its_own_map():
    model = Net()
    fst.convert(model, "fst")
    report = count_macs(model, step(model, 2, 3, 12, 20))
    layer = report.layers[1]
    assert (layer.name, layer.group, layer.kind) == ("body.shared", "body", "conv")
    assert layer.maps == ((2, 6, 10), (2, 3, 5))
    weights = 8 * 8 * 9
    assert layer.gemms["output"].dense == 2 * (60 + 15) * weights
    assert layer.gemms["output"].left == 2 * (60 + 15) * weights / 2
    assert layer.gemms["grad_weight"].left == 2 * (30 + 9) * weights


def test_what_autograd_skips_costs_nothing():
    model = nn.ModuleDict({name: nn.Conv2d(4, 4, 1) for name in ("frozen", "used", "lost", "idle")})
    fst.convert(model, "fst")
    model["frozen"].requires_grad_(False)

    def run() -> None:
        features = model["used"](model["frozen"](torch.randn(1, 4, 2, 2)))
        model["lost"](features)
        features.sum().backward()

    report = count_macs(model, run)
    assert report.idle == ("idle",)
    modes = {layer.name: [layer.gemms[gemm].mode for gemm in GEMMS] for layer in report.layers}
    assert modes == {
        "frozen": ["simulated", "not computed", "not computed"],
        "used": ["simulated", "not computed", "accelerated"],
        "lost": ["simulated", "not computed", "not computed"],
    }
    assert gemms(report, "frozen")["grad_weight"].reason == "the weight needs no gradient"
    assert gemms(report, "used")["grad_input"].reason == "the input needs no gradient"
    assert gemms(report, "lost")["grad_weight"].reason == "no gradient reached the output"
    assert report.total("grad_weight").dense == 64 and report.total("grad_input").dense == 0
    assert math.isnan(report.total("grad_input").share_sparse)


def test_totals_and_tables():
    model = Net()
    conversion = fst.convert(model, "fst", exclude="stem")
    run = step(model, 2, 3, 12, 20)
    assert gemms(count_macs(model, run), "stem")["output"].reason == "not converted"
    report = count_macs(model, run, conversion.skipped)
    assert report.groups == ("stem", "body", "head")
    total, body = report.total("output"), report.total("output", group="body")
    stem = 2 * 60 * 8 * 27
    assert total.dense == body.dense + stem and body.share_sparse == 1 and body.share_left == 0.5
    assert total.sparse == body.dense
    assert total.left == body.dense / 2 + stem
    assert report.total("output", group="head").dense == 0
    text = str(report)
    assert "body    conv    2" in text and "not computed" in text
    cells = [" ".join(map(str, row)).split() for row in report.exceptions()[1]]
    share = f"{stem / (stem + body.dense + 2 * 40):.2%}"
    assert f"output stem conv dense excluded 1 {share}".split() in cells
    skipped = "grad_input stem conv not computed the input needs no gradient 1"
    assert skipped.split() in cells and not any("body" in row for row in cells)
    header, rows = report.by_module()
    assert all(len(row) == len(header) for row in rows)


def test_other_weights_are_named_and_bad_arguments_refused():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 4, 2))
    report = count_macs(model, step(model, 1, 4, 3, 3))
    assert report.uncounted == ("1 (ConvTranspose2d)",) and "ConvTranspose2d" in str(report)
    with pytest.raises(ValueError, match="ran no convolution"):
        count_macs(model, lambda: None)
    with pytest.raises(TypeError, match="model is a str"):
        count_macs("model", lambda: None)
    assert not model[0]._forward_hooks


@pytest.mark.parametrize("row", of_each_kind(SETTINGS))
def test_every_strategy(row):
    model, strategy = Net(), row.build()
    fst.convert(model, strategy, include=["stem", "body"])
    attach(model)
    report = count_macs(model, step(model, 2, 3, 16, 16))
    for gemm in GEMMS:
        total = report.total(gemm)
        assert 0 < total.left <= total.dense
        if strategy.rule(gemm) is None:
            assert total.left == total.dense
