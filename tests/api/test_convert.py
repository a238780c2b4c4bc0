"""Conversion: in place, identity kept, nothing silent."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fst
from fst.layers.modules import SparseConv2d, SparseLinear
from tests.networks import attach, optimizer_for
from tests.strategy_settings import DEFAULTS, DETERMINISTIC, SETTINGS, of_each_kind


class Net(nn.Module):
    """A first convolution of three channels, a block, a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layer1 = nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 16, 1))
        self.layer2 = nn.Sequential(nn.Conv2d(16, 16, 3, groups=2, stride=2))
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = self.layer2(self.layer1(self.stem(x).relu()).relu()).relu()
        return self.head(x.mean((2, 3)))


CONVOLUTIONS = ["stem", "layer1.0", "layer1.2", "layer2.0"]


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("row", of_each_kind(SETTINGS))
def test_keeps_everything_but_the_class(net, row):
    parameters = dict(net.named_parameters())
    modules = dict(net.named_modules())
    state = {k: v.clone() for k, v in net.state_dict().items()}
    report = fst.convert(net, row.build())
    optimizer = optimizer_for(net, lr=0.1)
    assert report is not net
    assert dict(net.named_parameters()).keys() == parameters.keys()
    assert all(p is parameters[name] for name, p in net.named_parameters())
    assert all(m is modules[name] for name, m in net.named_modules())
    assert net.state_dict().keys() == state.keys()
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    for name in report.converted:
        layer = net.get_submodule(name)
        assert type(layer) is SparseConv2d and isinstance(layer, nn.Conv2d)
        assert layer.strategy == row.build() and layer.layer_name == name
    net.load_state_dict(state, strict=True)
    attach(net, optimizer)
    net(torch.randn(2, 3, 8, 8)).sum().backward()
    before = net.layer1[0].weight.clone()
    optimizer.step()
    assert not torch.equal(before, net.layer1[0].weight)  # the optimizer's parameters are in use


def test_report_names_every_layer(net):
    report = fst.convert(net, "fst")
    assert set(report.converted) == set(CONVOLUTIONS)
    assert set(report.skipped) == {"head"}
    assert "linear" in report.skipped["head"].lower()
    text = str(report)
    for name in (*CONVOLUTIONS, "head", "fst", "accelerated"):
        assert name in text
    assert set(fst.sparse_layers(net)) == set(CONVOLUTIONS)
    assert "fst" in repr(net) and "2:4" in repr(net.stem)


def test_sdgp_leaves_the_first_convolution_alone(net):
    report = fst.convert(net, "sdgp")
    assert "stem" in report.skipped and "3" in report.skipped["stem"]
    assert type(net.stem) is nn.Conv2d
    assert set(report.converted) == {"layer1.0", "layer1.2", "layer2.0"}
    assert set(fst.convert(net, "sdgp", include="stem").converted) == {"stem"}


def test_sdgp_counts_the_channels_of_the_input_not_of_the_group():
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(4, 8, 1), nn.Conv2d(3, 8, 1))
    report = fst.convert(model, "sdgp")
    assert set(report.converted) == {"0", "1"}


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("layer1", None, {"layer1.0", "layer1.2"}),
        ("layer1.*", None, {"layer1.0", "layer1.2"}),
        ("layer*", None, {"layer1.0", "layer1.2", "layer2.0"}),
        (["stem", "layer2"], None, {"stem", "layer2.0"}),
        (None, "stem", {"layer1.0", "layer1.2", "layer2.0"}),
        (None, ["stem", "layer2"], {"layer1.0", "layer1.2"}),
        ("layer*", "layer1.0", {"layer1.2", "layer2.0"}),
        (nn.Linear, None, {"head"}),
        ([nn.Linear, nn.Conv2d], None, {*CONVOLUTIONS, "head"}),
        ("*", None, {*CONVOLUTIONS, "head"}),
        ("head", None, {"head"}),
        (nn.Conv2d, "stem", {"layer1.0", "layer1.2", "layer2.0"}),
        ([nn.Conv2d, nn.Linear], nn.Linear, set(CONVOLUTIONS)),
    ],
)
def test_include_and_exclude(net, include, exclude, expected):
    report = fst.convert(net, "fst", include=include, exclude=exclude)
    assert set(report.converted) == expected == set(fst.sparse_layers(net))
    assert set(report.skipped) == {*CONVOLUTIONS, "head"} - expected
    assert all(report.skipped.values())
    if "head" in expected:
        assert type(net.head) is SparseLinear
    net(torch.randn(2, 3, 8, 8)).sum().backward()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(include="layer3"), ["include", "layer3", "layer1.0"]),
        (dict(include=["stem", "layr1"]), ["include", "layr1"]),
        (dict(exclude="layer3.*"), ["exclude", "layer3.*"]),
        (dict(include="stem", exclude="stem"), ["stem"]),
        (dict(exclude=nn.Conv2d), ["Conv2d"]),
        (dict(include=3), ["include", "3"]),
        (dict(include=[int]), ["include", "int"]),
    ],
    ids=str,
)
def test_nothing_matched_is_an_error(net, options, words):
    with pytest.raises((ValueError, TypeError)) as caught:
        fst.convert(net, "fst", **options)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{str(caught.value)!r} does not name {missing}"
    assert not fst.sparse_layers(net), "a failed conversion leaves the model as it was"


def test_a_model_without_convolutions_is_an_error():
    with pytest.raises(ValueError, match="Sequential"):
        fst.convert(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "fst")
    with pytest.raises((TypeError, ValueError), match="model"):
        fst.convert("resnet18", "fst")
    with pytest.raises((TypeError, ValueError), match="model"):
        fst.convert(nn.Conv2d(3, 4, 3).weight, "fst")


def test_a_single_layer_is_a_model():
    layer = nn.Conv2d(8, 8, 3)
    report = fst.convert(layer, "fst")
    assert len(report.converted) == 1 and type(layer) is SparseConv2d
    assert not layer(torch.randn(1, 8, 5, 5)).isnan().any()


def test_already_converted_layers_are_reported(net):
    fst.convert(net, "fst", include="stem")
    report = fst.convert(net, "sdgp")
    assert "already" in report.skipped["stem"] and "fst" in report.skipped["stem"]
    assert net.stem.strategy.name == "fst" and net.layer1[0].strategy.name == "sdgp"
    with pytest.raises(ValueError, match="already"):
        fst.convert(net, "fst")


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
@pytest.mark.parametrize("padding", [1, (2, 1), "same"])
def test_padding_modes(mode, padding):
    layer = nn.Conv2d(8, 8, 3, padding=padding, padding_mode=mode).double()
    dense = copy.deepcopy(layer)
    fst.convert(layer, "dense")
    input = torch.randn(2, 8, 6, 7, dtype=torch.float64)
    torch.testing.assert_close(layer(input), dense(input))
    sparse = copy.deepcopy(dense)
    fst.convert(sparse, "fst")
    sparse.eval()
    folded = fst.fold(sparse)
    assert folded.padding_mode == mode
    torch.testing.assert_close(sparse(input), folded(input))


@pytest.mark.parametrize("row", DEFAULTS)
def test_every_geometry_of_a_layer_is_used(row):
    """Stride, padding, dilation and groups of the layer reach the op."""
    layer = nn.Conv2d(8, 12, (3, 2), (2, 1), (1, 2), (1, 2), groups=2).double()
    fst.convert(layer, row.build())
    attach(layer)
    input = torch.randn(2, 8, 9, 8, dtype=torch.float64)
    output = layer(input)
    expected = F.conv2d(
        input, layer.effective_weight(), layer.bias, (2, 1), (1, 2), (1, 2), groups=2
    )
    torch.testing.assert_close(output, expected)


# ---------------------------------------------------------------- options of strategies


def test_options_of_a_strategy_are_keywords(net):
    fst.convert(net, "srste", decay=1e-3, n=1, include="stem")
    assert net.stem.strategy == fst.get_strategy("srste", decay=1e-3, n=1)


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        ("srste", dict(exlude="stem"), "'exlude' is neither an argument .* 'exclude'"),
        ("srste", dict(decai=1e-3), "'decai' is neither .* 'srste'.* 'decay'"),
        ("srste", dict(decay="much"), "decay='much' must be of type float"),
        (fst.get_strategy("srste"), dict(decay=1e-3), "'decay'.* cannot be applied to a finished"),
        ("srst", dict(decay=1e-3), "strategy='srst' is unknown.*'srste'"),
        *((wrong, {}, "strategy") for wrong in ("nope", None, 3)),
    ],
    ids=["argument", "option", "value", "finished", "strategy", "unknown", "None", "number"],
)
def test_wrong_options_are_refused_by_name(net, strategy, options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        fst.convert(net, strategy, **options)
    assert not fst.sparse_layers(net)


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("row", [row for row in DETERMINISTIC if row in DEFAULTS])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(net, row, how):
    fst.convert(net, row.build())
    attach(net)
    input = torch.randn(2, 3, 8, 8)
    net(input).sum().backward()  # with whatever it has cached
    if how == "deepcopy":
        other = copy.deepcopy(net)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(net))
    else:
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert set(fst.sparse_layers(other)) == set(fst.sparse_layers(net))
    assert other.layer1[0].strategy == row.build()
    assert torch.equal(other.eval()(input), net.eval()(input))
    with torch.no_grad():
        other.layer1[0].weight.neg_()
    assert not torch.equal(other.eval()(input), net.eval()(input)), "the copy shares something"
    attach(other)
    other.train()(input).sum().backward()


def test_hooks_stay(net):
    calls = []
    net.stem.register_forward_hook(lambda *_: calls.append("forward"))
    net.stem.weight.register_hook(lambda grad: calls.append("grad"))
    fst.convert(net, "fst")
    net(torch.randn(2, 3, 8, 8)).sum().backward()
    assert calls == ["forward", "grad"]


def test_moves_between_dtypes_and_modes(net):
    fst.convert(net, "tsm")
    input = torch.randn(2, 3, 8, 8)
    net(input)
    net.double()
    assert net(input.double()).dtype == torch.float64
    net.to(torch.bfloat16).to(memory_format=torch.channels_last)
    assert net(input.bfloat16()).dtype == torch.bfloat16
    net.float().eval().requires_grad_(False)
    with torch.inference_mode():
        assert net(input).isfinite().all()


def test_a_parameter_that_is_frozen_stays_frozen(net):
    net.stem.weight.requires_grad_(False)
    fst.convert(net, "fst", include="stem")
    net(torch.randn(2, 3, 8, 8)).sum().backward()
    assert net.stem.weight.grad is None and net.stem.bias.grad is not None


@pytest.mark.parametrize("layers", ["conv", "linear", "all"])
def test_a_table_in_a_frozen_layer_is_left_alone_unless_included(layers):
    """YOLO's DFL layer holds 0, 1, ..., 15, of which 2:4 would keep 2, 3, 6, 7, ..."""

    def model():
        table = nn.Conv2d(16, 1, 1, bias=False)
        table.weight = nn.Parameter(torch.arange(16.0).view(1, 16, 1, 1), requires_grad=False)
        teacher = nn.Linear(16, 16).requires_grad_(False)
        return nn.Sequential(nn.Conv2d(16, 16, 1), table, nn.Linear(16, 16), teacher, nn.ReLU())

    left = model()
    before = copy.deepcopy(left[1].weight)
    report = fst.convert(left, "srste", layers=layers)
    assert "1" in report.skipped and "3" in report.skipped and not {"1", "3"} & {*report.converted}
    if layers != "linear":
        assert report.skipped["1"] == "the weight needs no gradient; include the layer to prune it"
    assert torch.equal(fst.fold(left)[1].weight, before)
    asked = model()
    assert set(fst.convert(asked, "srste", include="*").converted) == {"0", "1", "2", "3"}
    with pytest.raises(ValueError, match="1  .*the weight needs no gradient"):
        fst.convert(nn.Sequential(nn.ReLU(), model()[1]), "srste")


def test_mask_and_effective_weight(net):
    fst.convert(net, "fst")
    layer = net.layer1[0]
    mask, effective = layer.output_mask(), layer.effective_weight()
    assert mask.dtype == torch.bool and mask.shape == layer.weight.shape
    assert torch.equal(effective, layer.weight * mask)
    assert not effective.requires_grad
    effective.zero_()  # a copy, not the weight itself
    assert layer.weight.any()
    fst.convert(net, "sdgp", include="head")
    assert net.head.output_mask() is None
    assert torch.equal(net.head.effective_weight(), net.head.weight)
