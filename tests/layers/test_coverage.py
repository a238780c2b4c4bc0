"""What share of a model is N:M: counted by hand, and by torch's own counter of multiply-adds."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fst
from fst.layers.coverage import inside_groups, multiply_adds
from tests.strategy_settings import setting


def network() -> nn.Sequential:
    """Images, a depthwise layer, groups of 6 channels, full groups, a linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12)),  # 324
        nn.Conv2d(12, 12, 3, groups=12),  # 108
        nn.Conv2d(12, 8, 1, groups=2),  # 48, of which 32 in full groups
        nn.Conv2d(8, 16, 3, stride=2, bias=False),  # 1152
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(16, 10)),  # 160
    )


ALL = 324 + 108 + 48 + 1152 + 160
IMAGES = torch.zeros(1, 3, 9, 9)
MACS = {
    "0.weight": 81 * 324,
    "2.weight": 49 * 108,
    "3.weight": 49 * 48,
    "4.weight": 9 * 1152,
    "8.weight": 160,
}


def test_a_report_counts_what_is_n_m_exempt_and_skipped() -> None:
    report = fst.convert(network(), "srste", example_input=IMAGES)
    assert report.coverage == (32 + 1152) / ALL
    macs = sum(MACS.values())
    share = (MACS["3.weight"] * 2 / 3 + MACS["4.weight"]) / macs
    assert report.covered.multiply_adds == pytest.approx(share)
    cells = [line.split() for line in str(report).splitlines()]
    exempt, inside = 324 + 108 + 16, 49 * 32 + 9 * 1152
    rest = MACS["0.weight"] + MACS["2.weight"] + 49 * 16
    assert ["2:4", "2", "1,184", f"{1184 / ALL:.1%}", f"{inside:,}", f"{share:.1%}"] in cells
    row = ["2", str(exempt), f"{exempt / ALL:.1%}", f"{rest:,}", f"{rest / macs:.1%}"]
    assert ["exempt:", "groups", "of", "fewer", "than", "4", *row] in cells
    reason = f"skipped: {report.skipped['8']}".split()
    assert [*reason, "1", "160", f"{160 / ALL:.1%}", "160", f"{160 / macs:.1%}"] in cells
    assert f"1 skipped; coverage {report.coverage:.1%}" in str(report).splitlines()[0]
    assert fst.convert(network(), "srste").covered.multiply_adds is None


@pytest.mark.parametrize(
    ("id", "coverage"),
    [
        ("srste", (32 + 1152) / ALL),
        ("fst-im2col", (12 * 24 + 12 * 8 + 32 + 1152) / ALL),
        ("tsm", (32 + 1152) / ALL),
        ("asp-4:8-im2col", (12 * 24 + 12 * 8 + 1152) / ALL),
        ("srste-4:4", 0.0),  # prunes nothing
        ("sdgp", 0.0),  # prunes no weight
        ("rigl", 0.0),  # no groups
    ],
)
def test_verify_finds_what_convert_promises(id: str, coverage: float) -> None:
    model = network()
    strategy = setting(id).build()
    report = fst.convert(model, strategy)
    assert report.coverage == pytest.approx(coverage)
    groups = strategy.output.weight_groups if strategy.output else None
    if groups is None or strategy.schedule is not None:  # whose masks come with training
        return
    plain = fst.fold(model)
    for target in (model, plain, plain.state_dict()):
        found = fst.verify(target, groups.n, groups.m, group_order=groups.group_order)
        assert found.ok and found.coverage == report.coverage


def test_verify_calls_no_depthwise_weight_2_4() -> None:
    model = network()
    fst.convert(model, "srste")
    report = fst.verify(model, example_input=IMAGES)
    assert report.ok and report.coverage == 1184 / ALL
    inside = MACS["3.weight"] * 2 / 3 + MACS["4.weight"]
    assert report.covered.multiply_adds == pytest.approx(inside / sum(MACS.values()))
    assert [w.name for w in report.layers if w.is_exempt] == ["0.weight", "2.weight"]
    assert report.not_pruned == 1  # the linear layer
    verdict = "2 weights are 2:4, 2 exempt (groups of fewer than 4), 1 not pruned"
    assert str(report).splitlines()[-1] == f"{verdict}; coverage {1184 / ALL:.1%}"


def test_a_model_below_min_coverage_is_not_ok() -> None:
    model = network()
    fst.convert(model, "srste")
    assert fst.verify(model, min_coverage=0.66).ok
    report = fst.verify(model, min_coverage=0.67)
    assert not report.ok and all(layer.ok for layer in report.layers)
    assert str(report).endswith("less than min_coverage=0.67")
    fst.convert(model, "srste", include=nn.Linear)
    assert fst.verify(model, min_coverage=0.67).ok
    plain = fst.fold(model)
    assert fst.verify(plain).coverage == fst.verify(model).coverage
    assert len(fst.verify(plain).layers) == len(fst.verify(model).layers) == 5
    assert fst.verify(plain, include="4.*").coverage == fst.verify(plain).coverage


@pytest.mark.parametrize("value", [-0.1, 1.01, float("nan"), True, "0.5", None])
def test_min_coverage_is_a_share(value: object) -> None:
    with pytest.raises(ValueError, match=f"min_coverage={value!r} must be a number in"):
        fst.verify(network(), min_coverage=value)


def test_bad_examples() -> None:
    with pytest.raises(ValueError, match="example_input needs a model"):
        fst.verify(network().state_dict(), example_input=IMAGES)
    model = network()
    with pytest.raises(TypeError, match="example_input is a list"):
        fst.convert(model, "srste", example_input=[IMAGES])
    assert not fst.sparse_layers(model)


def test_a_layer_that_is_never_called_is_not_covered() -> None:
    """Some models read the weight of a layer, in a way that `convert` cannot see."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.called, self.read = nn.Linear(8, 8, False), nn.Linear(8, 8, False)

        def forward(self, input: Tensor) -> Tensor:
            return product(self.called(input), self.read)

    def product(input: Tensor, layer: nn.Linear) -> Tensor:
        return F.linear(input, layer.weight)

    model = Reads()
    report = fst.convert(model, "srste", include="*", example_input=torch.zeros(1, 8))
    assert report.coverage == 0.5 and "not called in evaluation" in str(report)
    found = fst.verify(model, example_input=torch.zeros(1, 8))
    assert found.coverage == 0.5 and "not called in evaluation" in str(found)


class Everything(nn.Module):
    """Each kind of layer that is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(4, 8, 3, groups=2, stride=2), nn.ConvTranspose2d(8, 6, 3, stride=2, groups=2)
        )
        self.tokens = nn.Sequential(nn.Conv1d(6, 16, 3), nn.BatchNorm1d(16))
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.other = nn.MultiheadAttention(16, 2, kdim=6, vdim=4, batch_first=True)
        self.bilinear = nn.Bilinear(16, 4, 5)

    def forward(self, images: Tensor, memory: Tensor) -> Tensor:
        tokens = self.tokens(self.convs(images).flatten(2)).mT
        tokens = self.attention(tokens, tokens, tokens)[0]
        tokens = self.other(tokens, memory, value=memory[..., :4])[0]
        return self.bilinear(tokens, tokens[..., :4].contiguous())


def test_multiply_adds_are_those_that_torch_counts() -> None:
    model, inputs = Everything(), (torch.randn(2, 4, 7, 9), torch.randn(2, 5, 6))
    before = copy.deepcopy(model.state_dict())
    model.convs.eval()
    found = multiply_adds(model, inputs)
    assert model.training and not model.convs.training and model.tokens.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with FlopCounterMode(display=False) as counter:
        model(*inputs)  # in eval mode attention is one operation, which torch does not count
    counts = counter.get_flop_counts()

    def counted(name: str) -> int:
        return sum(counts[f"Everything.{name}"].values()) // 2

    assert found["convs.0.weight"] == counted("convs.0")
    assert found["convs.1.weight"] == counted("convs.1")
    assert found["tokens.0.weight"] == counted("tokens.0")
    length = model.tokens[0](model.convs(inputs[0]).flatten(2)).shape[2]
    products = 2 * 2 * length * length * 16  # of tokens, which have no weight
    projections = found["attention.in_proj_weight"] + found["attention.out_proj.weight"]
    assert projections == counted("attention") - products
    parts = (f"other.{part}_proj_weight" for part in "qkv")
    projections = sum(found[part] for part in parts) + found["other.out_proj.weight"]
    assert projections == counted("other") - 2 * 2 * length * 5 * 16
    assert found["bilinear.weight"] == 2 * length * 16 * 4 * 5


def test_elements_in_full_groups() -> None:
    assert inside_groups((8, 3, 3, 3), 2, 4) == 0
    assert inside_groups((8, 3, 3, 3), 2, 4, "im2col") == 8 * 24
    assert inside_groups((8, 11, 2, 1), 2, 4) == 8 * 8 * 2
    assert inside_groups((8, 16), 4, 8) == 8 * 16
    assert inside_groups((8, 16), 4, 4) == 0
