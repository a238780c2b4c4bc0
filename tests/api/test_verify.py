"""verify says whether weights obey a pattern, and names the first group that does not."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import fst
from fst import NM
from fst.rules.nm import Transposable
from tests.networks import three_convolutions, trained
from tests.strategy_settings import SETTINGS, setting

_MAGNITUDE_ROWS = [
    row
    for row in SETTINGS
    if row.prunes_weight
    and row.custom is None
    and row.name not in ("sdgf", "mdgf", "maxq", "step")  # on their way: test_since_2021
    and isinstance(row.build().output, (NM, Transposable))
    and row.build().min_in_channels == 1  # else the first layer stays dense
]


@pytest.mark.parametrize("row", _MAGNITUDE_ROWS)
def test_folded_models_satisfy_the_pattern(row, tmp_path):
    net = trained(row)
    rule = row.build().output
    options = dict(n=rule.n, m=rule.m, group_order=rule.group_order)
    folded = fst.fold(net)
    path = tmp_path / "folded.pth"
    torch.save(folded.state_dict(), path)
    nested = tmp_path / "nested.pth"
    torch.save({"state_dict": folded.state_dict(), "meta": {"epoch": 3}}, nested)
    for target in (net, folded, folded.state_dict(), path, str(path), nested):
        report = fst.verify(target, **options)
        assert report.ok, str(report)
        assert len(report.layers) == 3
        assert "3.weight" in str(report)
    if row.name in ("asp", "acdc", "rigl"):
        assert fst.verify(net.state_dict(), **options).ok, "pruned weights stay zero"
    elif rule.n < 8:  # as many input channels as the widest layer has in a convolution group
        assert not fst.verify(net.state_dict(), **options).ok, "the dense weights in training"


@pytest.mark.parametrize("id", ["dense", "sdgp", "sdgp-random"])
def test_dense_weights_do_not_satisfy_it(id):
    net = trained(setting(id))
    for target in (net, fst.fold(net), net.state_dict()):
        report = fst.verify(target)
        assert not report.ok and "0.weight" in str(report)


def test_verify_respects_the_order_of_each_layer():
    """A converted model is checked in the order its own strategy prunes."""
    net = trained(setting("fst-im2col"))
    assert fst.verify(net).ok
    assert fst.verify(fst.fold(net), group_order="im2col").ok
    assert not fst.verify(fst.fold(net), group_order="channel").ok


def _pruned_weight(*shape):
    weight = torch.zeros(shape)
    weight[:, ::2] = 1.0
    return weight


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ((0, 1, 0, 0), ["0", "0:4"]),
        ((2, 5, 1, 2), ["2", "4:8", "1", "2"]),
        ((7, 9, 2, 2), ["7", "8:11", "2"]),
    ],
)
def test_the_first_offending_group_is_named(index, words):
    """8 x 11 channels: the last group has three, of which two are kept already."""
    state = {
        "a.weight": _pruned_weight(4, 8, 3, 3),
        "b.weight": _pruned_weight(8, 11, 3, 3),
        "c.weight": torch.ones(4, 8, 3, 3),
    }
    state["b.weight"][index] = 5.0
    report = fst.verify(state)
    assert not report.ok
    assert [check.name for check in report.layers if not check.ok] == ["b.weight", "c.weight"]
    (offence,) = (c.offence for c in report.layers if c.name == "b.weight")
    assert "3" in offence and all(word in offence for word in words), offence
    assert offence in str(report)
    state["b.weight"][index] = 0.0
    del state["c.weight"]
    assert fst.verify(state).ok


def test_the_first_of_several_offences_is_named():
    weight = torch.zeros(4, 8, 1, 1)
    weight[1, 4:7] = 1.0
    weight[3] = 1.0
    (check,) = fst.verify({"w": weight}).layers
    assert "[1, 4:8, 0, 0]" in check.offence


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 7])
def test_the_last_short_group_is_checked_and_no_group_too_many(channels):
    weight = torch.ones(2, channels, 1, 1)
    weight[:, 2:4] = 0.0
    weight[:, 6:8] = 0.0
    assert fst.verify({"w": weight}).ok
    if channels >= 3:
        weight[1, 2] = 1.0
        assert not fst.verify({"w": weight}).ok
    if channels == 7:
        weight[1, 2], weight[1, 6] = 0.0, 1.0
        assert "4:7" in fst.verify({"w": weight}).layers[0].offence


def test_density_and_non_finite_weights():
    weight = _pruned_weight(4, 8, 1, 1)
    (check,) = fst.verify({"w": weight}).layers
    assert check.density == 0.5
    weight[0, 1] = float("nan")
    assert not fst.verify({"w": weight}).ok
    weight[0, 1] = -0.0
    assert fst.verify({"w": weight}).ok


def test_what_is_verified():
    net = trained(setting("fst"), include=["0", "3"])
    report = fst.verify(net, include=["0.weight", "3.weight"])
    assert report.ok and len(report.layers) == 2
    assert fst.verify(net).ok and fst.verify(net).not_pruned == 2  # "4" and the linear layer
    assert not fst.verify(net, include=["0", "3", "4"]).ok
    assert fst.verify(net, exclude="3").layers[0].name == "0.weight"
    state = {"head.weight": _pruned_weight(4, 8), "w": _pruned_weight(4, 8, 1, 1)}
    assert [c.name for c in fst.verify(state).layers] == ["w"]
    assert fst.verify(state, include="head.*").ok
    linear = nn.Sequential(nn.Linear(8, 8))
    fst.convert(linear, "fst", include="0")
    assert fst.verify(linear).ok and fst.verify(linear).layers[0].name == "0.weight"


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("layer1", {"layer1.0", "layer1.2"}),
        ("layer?", {"layer1.0", "layer1.2", "layer2.0"}),
        ("layer*.0", {"layer1.0", "layer2.0"}),
        (["stem", "layer2"], {"stem", "layer2.0"}),
        (nn.Linear, {"head"}),
        ("head", {"head"}),
    ],
)
def test_a_selector_means_the_same_everywhere(selector, expected):
    net = nn.Module()
    net.stem, net.head = nn.Conv2d(8, 8, 3), nn.Linear(8, 8)
    net.layer1 = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1))
    net.layer2 = nn.Sequential(nn.Conv2d(8, 8, 1))
    net.layer2.position = nn.Parameter(torch.randn(1, 8, 4))  # no layer's weight
    checked = fst.verify(net, include=selector).layers
    assert {check.name for check in checked} == {f"{name}.weight" for name in expected}
    if isinstance(selector, str):
        state = fst.verify(net.state_dict(), include=selector).layers
        assert [check.name for check in state] == [check.name for check in checked]
    assert set(fst.patterns(net, 0.5, m=4, include=selector)) == expected
    if isinstance(selector, str):
        assert set(fst.hold(_with_zeros(net), include=selector).masks) == {
            f"{name}.weight" for name in expected
        }
    assert set(fst.convert(net, "srste", include=selector).converted) == expected
    with pytest.raises(ValueError, match="target has no"):
        fst.verify(net, include=selector, exclude=selector)


def _with_zeros(net):
    net = copy.deepcopy(net)
    for weight in net.parameters():
        weight.data.flatten()[0] = 0
    return net


def _dense_after_fold(wrap):
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
    fst.convert(model, "srste", include="0")
    model = fst.fold(model)
    wrap(model[1])
    return model


class _TwoNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = self.b = nn.Conv2d(8, 8, 3)
        self.pos = nn.Parameter(torch.randn(1, 8, 5, 5))


def _converted(model, wrap=lambda layer: None):
    fst.convert(model, "srste")
    wrap(next(iter(fst.sparse_layers(model).values())))
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (
            lambda: _dense_after_fold(nn.utils.weight_norm),
            {"0.weight": True, "1.weight": False},
        ),
        (
            lambda: _dense_after_fold(lambda layer: prune.l1_unstructured(layer, "weight", 0.01)),
            {"0.weight": True, "1.weight": False},
        ),
        (
            lambda: torch.jit.script(_dense_after_fold(lambda layer: None)),
            {"0.weight": True, "1.weight": False},
        ),
        (lambda: _converted(_TwoNames()), {"a.weight": True}),
        (lambda: fst.fold(_converted(_TwoNames())), {"a.weight": True}),
        (
            lambda: _converted(
                nn.Sequential(nn.Conv2d(8, 8, 3)), nn.utils.parametrizations.spectral_norm
            ),
            {"0.weight": True},
        ),
    ],
    ids="weight_norm prune scripted two_names folded spectral_norm".split(),
)
def test_a_model_is_verified_by_what_its_layers_compute_with(build, expected):
    report = fst.verify(build(), include=[name.rpartition(".")[0] for name in expected])
    assert {check.name: check.ok for check in report.layers} == expected


def test_groups_of_a_transposed_convolution_lie_along_its_inputs():
    """Its weight is (Cin, Cout/groups, kh, kw), and Cin is what it sums over."""
    layer = nn.ConvTranspose2d(8, 6, 2, groups=2)
    assert not fst.verify(layer).ok
    with torch.no_grad():
        layer.weight[2:4] = layer.weight[6:8] = 0
    report = fst.verify(layer)
    assert report.ok and report.coverage == 1
    assert report.layers[0].shape == (6, 4, 2, 2)
    assert not fst.verify(layer, m=8, n=1).ok


def test_weights_without_values_are_refused_by_name(tmp_path):
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU())
    fst.convert(model, "srste")
    for target in (model, fst.fold(model), model.state_dict()):
        with pytest.raises(ValueError, match="target: '0.weight' is on the meta device"):
            fst.verify(target)
    path = tmp_path / "m.safetensors"
    with pytest.raises(ValueError, match="model: '0.weight' is on the meta device"):
        fst.export(model, path)
    assert not path.exists()


def _quantised(folder, form):
    """A folded 2:4 network whose linear layer is int8, in some form."""
    from torch.ao.quantization import quantize_dynamic

    net = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 4))
    fst.convert(net, "srste")
    net = quantize_dynamic(fst.fold(net), {nn.Linear}, torch.qint8)
    if form == "file":
        torch.save(net.state_dict(), folder / "int8.pth")
        return folder / "int8.pth"
    return net if form == "model" else net.state_dict()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="no fbgemm")
@pytest.mark.parametrize("form", ["model", "state_dict", "file"])
def test_quantised_layers_are_named_and_not_covered(form, tmp_path):
    target = _quantised(tmp_path, form)
    report = fst.verify(target)
    rows = {w.name: w.label for w in report.covered.rows}
    assert rows == {"0.weight": "2:4", "2.weight": "quantised, not checked"}
    assert report.unread == {"2.weight": "quantised, not checked"} and not report.ok
    assert report.coverage == 576 / (576 + 32)
    report = fst.verify(target, exclude="2")
    assert report.ok and report.not_checked == 1 and report.coverage == 576 / (576 + 32)
    with pytest.raises(ValueError, match="the weights 2.weight are quantised"):
        fst.verify(target, include="2")


def test_integer_weights_are_quantised():
    state = {"a.weight": _pruned_weight(4, 8, 3, 3), "b.qweight": torch.ones(4, 8).to(torch.int8)}
    report = fst.verify(state | {"index": torch.ones(4, 8).long()})
    assert [w.label for w in report.covered.rows] == ["2:4", "quantised, not checked"]
    assert not report.ok and fst.verify(state, exclude="b.*").ok


@pytest.mark.parametrize("exclude", [None, "3", "0"])
@pytest.mark.parametrize("strategy", ["srste", "acdc", "sdgp"])
def test_the_last_line_counts_each_row_of_the_table_once(strategy, exclude):
    net = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1)),
        *(nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(8, 4)),
    )
    fst.convert(net, strategy)
    report = fst.verify(net, exclude=exclude)
    said = str(report).splitlines()[-1].partition(";")[0]
    numbers = [
        int(part.split()[0]) for part in said.replace("(groups of fewer than 4)", "").split(", ")
    ]
    assert sum(numbers) == len(report.covered.rows) == 5, said
    assert len(report.layers) + report.not_checked + report.not_pruned == 5


def test_the_last_line_says_how_many_weights_have_which_pattern():
    net = nn.Sequential(*(nn.Conv2d(8, 8, 1) for _ in range(3)))
    fst.convert(net, "srste", patterns={"2": "1:4"})
    said = str(fst.verify(net)).splitlines()[-1]
    assert said == "1 weight is 1:4, 2 weights are 2:4; coverage 100.0%"


def test_lazy_layers_are_refused_by_name():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.LazyConvTranspose2d(4, 1))
    with pytest.raises(ValueError, match="'1.weight' has no shape yet: run the model once"):
        fst.verify(model)


def test_other_tensors_of_a_model_are_verified_if_named():
    model = fst.fold(_converted(_TwoNames()))
    assert not fst.verify(model, include="pos").ok


@pytest.mark.parametrize("target", [{}, {"bias": torch.zeros(4)}, nn.ReLU(), nn.Linear(4, 4)])
def test_nothing_to_verify_is_an_error(target):
    with pytest.raises(ValueError, match="weight"):
        fst.verify(target)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(n=5), ["5", "4"]),
        (dict(m=0), ["0"]),
        (dict(m=64), ["64", "32"]),
        (dict(n=2.0), ["2.0"]),
        (dict(group_order="nhwc"), ["group_order", "nhwc", "channel"]),
        (dict(include="nothing"), ["include", "nothing", "3.weight"]),
        (dict(exclude="nothing.*"), ["exclude", "nothing.*"]),
        (dict(include=nn.ConvTranspose2d), ["include", "ConvTranspose2d", "3.weight"]),
        (dict(include=int), ["include", "int", "pattern"]),
        (dict(exclude=["*", 3]), ["exclude", "3", "pattern"]),
    ],
    ids=str,
)
def test_bad_options(options, words):
    with pytest.raises((ValueError, TypeError)) as caught:
        fst.verify(three_convolutions(), **options)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{str(caught.value)!r} does not name {missing}"


@pytest.mark.parametrize("function", [fst.fold, fst.metrics, fst.sparse_layers, fst.sparsity_state])
def test_what_is_no_model_is_refused_by_name(function):
    with pytest.raises(TypeError, match="model is a dict; it must be a torch.nn.Module"):
        function({"state_dict": {}})


@pytest.mark.parametrize("target", [None, 3, [torch.zeros(4, 4, 1, 1)]])
def test_bad_target(target):
    with pytest.raises((ValueError, TypeError), match="target"):
        fst.verify(target)


def test_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.pth"):
        fst.verify(tmp_path / "absent.pth")
    with pytest.raises((ValueError, OSError), match=str(tmp_path)):
        fst.verify(tmp_path)

    whole = tmp_path / "whole.pth"
    torch.save({"w": torch.zeros(64, 64, 3, 3)}, whole)
    content = whole.read_bytes()
    files = {
        "text.pth": b"these are no weights",
        "empty.pth": b"",
        "cut.pth": content[: len(content) // 2],
        "start.pth": content[:100],
        "zip.pth": b"PK\x03\x04" + b"\0" * 200,
        "pickle.pth": pickle.dumps([1, 2, 3]),
        "number.pth": pickle.dumps({"a": 3}),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError) as caught:
            fst.verify(tmp_path / name)
        assert name in str(caught.value) or "weight" in str(caught.value), name
    with pytest.raises(ValueError, match="empty.pth' is empty"):
        fst.verify(tmp_path / "empty.pth")

    torch.save([torch.zeros(4, 4, 1, 1)], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="list"):
        fst.verify(tmp_path / "list.pth")
    torch.save(three_convolutions(), tmp_path / "module.pth")
    with pytest.raises(ValueError, match=r"module\.pth"):
        fst.verify(tmp_path / "module.pth")


@pytest.mark.parametrize("new", [True, False])
def test_a_tensor_that_claims_more_than_its_file_is_refused_by_name(new, tmp_path):
    """One number of any shape: checking it would take 8 GiB."""
    state = {"w": torch.ones(1).expand(32768, 65536), "a.weight": torch.zeros(4, 4, 1, 1)}
    torch.save(state, tmp_path / "m.pth", _use_new_zipfile_serialization=new)
    with pytest.raises(ValueError, match=r"m\.pth': the tensor 'w' .*is larger than the file"):
        fst.verify(tmp_path / "m.pth")
