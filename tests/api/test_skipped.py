"""Layers that `fst.convert` leaves as they are, each with its reason; tied weights."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import fst

X = torch.ones(1, 8, 7, 7)


def test_subclasses_are_skipped_with_a_reason():
    class Special(nn.Conv2d):
        def forward(self, input):
            return super().forward(input) + 1

    model = nn.Sequential(Special(8, 8, 3), nn.Conv2d(8, 8, 3), nn.ConvTranspose2d(8, 8, 3))
    report = fst.convert(model, "fst")
    assert list(report.converted) == ["1"]
    assert "Special" in report.skipped["0"] and "ConvTranspose2d" in report.skipped["2"]
    assert type(model[0]) is Special


def test_lazy_modules_are_skipped_with_a_reason():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.LazyConv2d(8, 3), nn.Flatten(), nn.LazyLinear(4))
    report = fst.convert(model, "fst")
    assert "lazy" in report.skipped["1"].lower() and "3" in report.skipped
    input = torch.randn(2, 3, 8, 8)
    model(input)
    assert type(model[1]) is nn.Conv2d
    assert set(fst.convert(model, "fst").converted) == {"1"}
    model(input).sum().backward()


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_weights_that_no_rule_prunes_are_skipped_with_a_reason(dtype):
    """Else they are converted, and the first forward pass or the fold fails."""
    model = nn.Sequential(nn.Conv2d(8, 8, 3).to(dtype), nn.Conv2d(8, 8, 3))
    report = fst.convert(model, "srste")
    assert list(report.converted) == ["1"] and type(model[0]) is nn.Conv2d
    assert f"its weight is {dtype}; only torch.float16" in report.skipped["0"]


def test_a_forward_of_the_instance_s_own_is_skipped_with_a_reason():
    """A class that is changed under it would never be called."""
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
    model[1].forward = partial(nn.Conv2d.forward, model[1])
    report = fst.convert(model, "srste")
    assert set(report.converted) == {"0"} and type(model[1]) is nn.Conv2d
    assert "forward was replaced on the instance" in report.skipped["1"]
    assert "convert first" in report.skipped["1"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, partial(torch.jit.trace, example_inputs=X)])
def test_compiled_modules_are_skipped_with_a_reason(compiled):
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3), compiled(nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()))
    )
    expected = model(X)
    report = fst.convert(model, "sdgp", example_input=X)
    assert set(report.converted) == {"0"}
    assert "compiled by torch.jit" in report.skipped["1.0"]
    torch.testing.assert_close(model(X), expected)
    with pytest.raises(ValueError, match="nothing to convert.*\n(.|\n)*compiled by torch.jit"):
        fst.convert(model[1], "sdgp")


def test_parametrized_modules_are_skipped_with_a_reason():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
    nn.utils.parametrizations.weight_norm(model[1])
    nn.utils.parametrizations.spectral_norm(model[2])
    report = fst.convert(model, "fst")
    assert set(report.converted) == {"0"}
    assert "parametri" in report.skipped["1"] and "parametri" in report.skipped["2"]
    assert parametrize.is_parametrized(model[1])


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, partial(prune.l1_unstructured, amount=9)])
def test_hook_based_reparametrizations_keep_their_values(wrap):
    """These set ``weight`` to a plain tensor before each call."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    wrap(model[1], name="weight")
    input = torch.randn(1, 3, 8, 8)
    dense = model(input)
    report = fst.convert(model, "sdgp", include="*")
    assert report.skipped["1"].startswith("parametrized")
    output = model(input)
    torch.testing.assert_close(output, dense)
    output.sum().backward()
    leaves = [p for name, p in model[1].named_parameters() if "weight" in name]
    assert leaves and all(p.grad is not None and p.grad.any() for p in leaves)


class _Tied(nn.Module):
    """Two layers of one Parameter, and a third of its own."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second, self.third = first, second, nn.Linear(8, 8)
        self.second.weight = self.first.weight


def _built(model):
    again = copy.deepcopy(model)
    for parameter in again.parameters():
        nn.init.zeros_(parameter)
    return again


@pytest.mark.parametrize(
    ("second", "options", "skipped"),
    [
        (lambda: nn.Linear(8, 8), {"include": nn.Linear}, set()),
        (lambda: nn.Embedding(8, 8), {"include": nn.Linear}, {"first"}),
        (lambda: nn.Linear(8, 8), {"include": nn.Linear, "exclude": "second"}, {"first", "second"}),
        (lambda: nn.Linear(8, 8), {"include": ["first", "third"]}, {"first", "second"}),
    ],
    ids=["both", "embedding", "excluded", "not_included"],
)
def test_a_tied_weight_is_converted_everywhere_or_nowhere(second, options, skipped):
    net = _Tied(nn.Linear(8, 8), second())
    report = fst.convert(net, "srste", **options)
    assert set(report.skipped) == skipped
    if skipped:
        assert "shares its weight with second.weight" in report.skipped["first"]
    folded = fst.fold(net)
    assert folded.first.weight is folded.second.weight
    again = _built(folded)
    again.load_state_dict(folded.state_dict())
    input = torch.randn(4, 8)
    assert torch.equal(again.first(input), folded.first(input))
    torch.testing.assert_close(folded.first(input), net.eval().first(input))


def test_a_convolution_tied_to_a_transposed_one_stays_dense():
    net = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3), nn.ConvTranspose2d(8, 8, 3))
    net[2].weight = net[0].weight
    report = fst.convert(net, "fst")
    assert set(report.converted) == {"1"} and "shares its weight" in report.skipped["0"]


def test_masks_that_each_layer_draws_are_refused_for_tied_weights():
    net = _Tied(nn.Linear(8, 8), nn.Linear(8, 8))
    random = fst.Strategy("random", output=fst.NM("weight", rule="random"))
    report = fst.convert(net, random, include=nn.Linear)
    assert set(report.converted) == {"third"} and "shares its weight" in report.skipped["second"]
    with pytest.raises(ValueError, match="nothing to convert(.|\n)*shares its weight"):
        fst.convert(_Tied(nn.Linear(8, 8), nn.Embedding(8, 8)), "srste", include="first")
