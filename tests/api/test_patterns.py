"""N:M of each layer: for a budget, in `fst.convert`, and what follows it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fst
from fst.strategies.rigl import erk_densities


class Net(nn.Module):
    """A first convolution of three channels, four that can be 16-wide groups, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.narrow = nn.Conv2d(16, 32, 1)
        self.grouped = nn.Conv2d(32, 32, 3, groups=2, stride=2, padding=1)
        self.wide = nn.Conv2d(32, 64, 3, padding=1)
        self.last = nn.Conv2d(64, 40, 1)
        self.head = nn.Linear(40, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.stem, self.narrow, self.grouped, self.wide, self.last):
            x = layer(x).relu()
        return self.head(x.mean((2, 3)))


X = torch.zeros(1, 3, 12, 12)
POSITIONS = {"stem": 144, "narrow": 144, "grouped": 36, "wide": 36, "last": 36}


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():  # magnitudes unlike from layer to layer, and within groups
        net.wide.weight.pow_(3)
        net.narrow.weight[:, ::2].mul_(0.01)
    return net


def share_left(net: nn.Module, found: dict[str, str], weigh: dict[str, int] | None = None) -> float:
    """Counted in masks, not by formulas."""
    fst.convert(net := copy.deepcopy(net), "srste", patterns=found)
    kept = whole = 0
    for name, layer in fst.sparse_layers(net).items():
        each = 1 if weigh is None else weigh[name]
        kept += each * int((layer.effective_weight() != 0).sum())
        whole += each * layer.weight.numel()
    return kept / whole


@pytest.mark.parametrize("left", [1.0, 0.6, 0.3, 0.15])
def test_the_budget_is_kept_and_used(net: Net, left: float) -> None:
    found = fst.patterns(net, left)
    assert found.keys() == {"stem", "narrow", "grouped", "wide", "last"}
    assert found["stem"] == "16:16"  # groups of three
    share = share_left(net, found)
    assert share <= left + 1e-9
    larger = [
        found | {name: f"{2 * int(n)}:16"}
        for name, n in ((k, v.partition(":")[0]) for k, v in found.items())
        if n != "16"
    ]
    # one more step of some layer would have been too much, so the last one taken was needed
    assert left == 1 or any(share_left(net, other) > left for other in larger)


def test_budget_of_multiply_adds(net: Net) -> None:
    options = {"budget": "multiply-adds", "example_input": X}
    found = fst.patterns(net, 0.4, **options)
    assert 0.2 < share_left(net, found, POSITIONS) <= 0.4
    assert found != fst.patterns(net, 0.4)


def test_erk_is_the_nearest_of_the_densities(net: Net) -> None:
    found = fst.patterns(net, 0.25, exclude="stem")
    names = list(found)
    shapes = [net.get_submodule(name).weight.shape for name in names]
    densities = dict(zip(names, erk_densities(shapes, 0.25), strict=True))
    for name, pattern in found.items():
        ratio = int(pattern.partition(":")[0]) / 16 / densities[name]
        assert 0.5 <= ratio < 2.01, (name, ratio)


def test_linear_layers_im2col_and_other_m(net: Net) -> None:
    found = fst.patterns(net, 0.5, m=8, include=["head", "wide"], group_order="im2col")
    assert found.keys() == {"head", "wide"} and all(p.endswith(":8") for p in found.values())


@pytest.mark.parametrize("strategy", ["srste", "asp", "fst_w", "sste", "rigl"])
def test_layers_train_fold_and_verify_by_their_own(net: Net, strategy: str) -> None:
    options = {"n": 2, "m": 4} if strategy == "rigl" else {}
    patterns = {"*": "4:16", "narrow": "1:4", "last": "3:8"}
    report = fst.convert(net, strategy, patterns=patterns, exclude="stem", **options)
    assert "4:16" in str(report) and "1:4" in str(report)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    fst.attach(net, optimizer, total_steps=4)
    for _ in range(4):
        optimizer.zero_grad()
        net(torch.randn(4, 3, 12, 12)).square().mean().backward()
        optimizer.step()
    plain = fst.fold(net)
    result = fst.verify(plain)
    assert result.ok and result.pattern == "1:4, 3:8, 4:16", str(result)
    assert not fst.verify(plain, 2, 4).ok
    assert fst.verify(plain.state_dict()).ok
    expected = {"grouped": (4, 16), "wide": (4, 16), "narrow": (1, 4), "last": (3, 8)}
    for name, (n, m) in expected.items():
        rows = plain.get_submodule(name).weight.detach().movedim(1, -1).flatten(0, -2)
        counts = (rows.unflatten(-1, (-1, m)) != 0).sum(-1)
        assert int(counts.max()) == n, name
    with torch.no_grad():
        plain.narrow.weight.fill_(1)
    assert not fst.verify(plain).ok


def test_a_state_of_other_patterns_is_refused(net: Net) -> None:
    other = copy.deepcopy(net)
    fst.convert(net, "srste", patterns={"wide": "1:4"})
    fst.convert(other, "srste", patterns={"last": "1:4"})
    with pytest.raises(ValueError, match="use the strategy that it was saved with"):
        fst.load_sparsity_state(other, fst.sparsity_state(net))
    again = Net()
    fst.convert(again, "srste", patterns={"wide": "1:4"})
    fst.load_sparsity_state(again, fst.sparsity_state(net))


def test_a_shared_weight_has_one_pattern(net: Net) -> None:
    net.twin = nn.Conv2d(32, 64, 3, padding=1)
    net.twin.weight = net.wide.weight
    report = fst.convert(net, "srste", patterns={"wide": "1:4"})
    assert "not pruned alike" in report.skipped["wide"]


@pytest.mark.parametrize(
    ("patterns", "error", "words"),
    [
        ({"wide": "2-4"}, ValueError, ["patterns['wide']", "2-4", "'n:m'"]),
        ({"wide": (2, 4)}, ValueError, ["patterns['wide']", "(2, 4)"]),
        ({"wide": "4:2"}, ValueError, ["n=4, m=2"]),
        ({"wid": "2:4"}, ValueError, ["patterns='wid'", "wide"]),
        ({"stem": "2:4"}, ValueError, ["patterns='stem'", "converted layer"]),
        ({3: "2:4"}, TypeError, ["3"]),
        (["2:4"], TypeError, ["patterns=['2:4']"]),
    ],
)
def test_bad_patterns(net: Net, patterns: object, error: type, words: list[str]) -> None:
    with pytest.raises(error) as raised:
        fst.convert(net, "srste", exclude="stem", patterns=patterns)
    assert all(word in str(raised.value) for word in words), raised.value
    assert not fst.sparse_layers(net)


def test_strategies_without_a_pattern_are_refused(net: Net) -> None:
    for name in ("sdgp", "dpf", "dense", "mvue"):
        with pytest.raises(ValueError, match=f"{name!r} prunes no weight to N:M"):
            fst.convert(net, name, patterns={"*": "1:4"})
    fst.convert(net, "sdgf", structure="geometric", patterns={"wide": "2:8"})
    with pytest.raises(ValueError, match="groups of 64"):
        fst.attach(net, torch.optim.SGD(net.parameters(), 0.1), total_steps=10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"left": 0}, ["left=0", "(0, 1]"]),
        ({"left": True}, ["left=True"]),
        ({"left": 0.01}, ["left=0.01", "1:16 in every layer leaves"]),
        ({"budget": "flops"}, ["budget='flops'", "multiply-adds"]),
        ({"m": 64}, ["m=64"]),
        ({"group_order": "rows"}, ["group_order='rows'"]),
        ({"budget": "multiply-adds"}, ["example_input=None"]),
        (
            {"budget": "multiply-adds", "example_input": torch.ones(1, 5, 8, 8)},
            ["example_input: ", "(1, 5, 8, 8)", "channels"],
        ),
        ({"include": "nothing"}, ["include='nothing'"]),
        ({"exclude": "nothing"}, ["exclude='nothing'"]),
        ({"exclude": "*"}, ["nothing to make sparse"]),
    ],
)
def test_bad_arguments(net: Net, options: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError) as raised:
        fst.patterns(net, **{"left": 0.5, **options})
    assert all(word in str(raised.value) for word in words), raised.value


def test_files_keep_each_layers_pattern(net: Net, tmp_path) -> None:
    pytest.importorskip("safetensors")
    fst.convert(net, "srste", patterns={"wide": "4:16", "last": "3:8"}, exclude="stem")
    path = tmp_path / "model.safetensors"
    report = fst.export(net, path)
    found = {weight.name: weight.pattern for weight in report.weights if weight.pattern}
    assert found == {
        "narrow.weight": "2:4",
        "grouped.weight": "2:4",
        "wide.weight": "4:16",
        "last.weight": "3:8",
    }
    assert fst.verify(path).ok and fst.verify(path).pattern == "2:4, 3:8, 4:16"
