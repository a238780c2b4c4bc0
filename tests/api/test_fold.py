"""fold gives plain layers that hold S(W)."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import fst
from tests.networks import seven_pixels, three_convolutions, trained
from tests.strategy_settings import SETTINGS, of_each_kind, setting


@pytest.mark.parametrize("row", of_each_kind(SETTINGS))
def test_fold_equals_the_evaluated_model(row):
    net = trained(row, include=["*"])
    input = seven_pixels()
    with torch.no_grad():
        expected = net(input)
    keys, weight = net.state_dict().keys(), net[3].weight
    dense = weight.detach().clone()
    folded = fst.fold(net)
    assert folded is not net
    assert not fst.sparse_layers(folded)
    assert {type(m) for m in folded} == {
        nn.Conv2d,
        nn.BatchNorm2d,
        nn.ReLU,
        nn.Flatten,
        nn.Linear,
    }
    assert folded.state_dict().keys() == keys
    assert torch.equal(folded[3].weight, net[3].effective_weight())
    assert torch.equal(net[3].weight, dense) and net[3].weight is weight  # left as it was
    assert len(fst.sparse_layers(net)) == 4
    with torch.no_grad():
        torch.testing.assert_close(folded(input), expected)
    plain = three_convolutions().eval()
    plain.load_state_dict(folded.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(plain(input), expected)
    copy.deepcopy(folded), pickle.dumps(folded)
    folded.train()(input).sum().backward()


def test_fold_in_place():
    net = trained(setting("fst"))
    parameters = dict(net.named_parameters())
    expected = net(seven_pixels().fill_(0.5))
    folded = fst.fold(net, inplace=True)
    assert folded is net and not fst.sparse_layers(net)
    assert all(p is parameters[name] for name, p in net.named_parameters())
    torch.testing.assert_close(net(seven_pixels().fill_(0.5)), expected)
    fst.convert(net, "sdgp", include="3")  # plain layers again


def test_fold_of_a_single_layer():
    layer = nn.Conv2d(8, 8, 3)
    fst.convert(layer, "fst")
    folded = fst.fold(layer)
    assert (
        type(folded) is nn.Conv2d
        and fst.verify(folded).ok
        and not fst.verify(three_convolutions()).ok
    )


def test_fold_of_tied_weights():
    first, second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    second.weight = first.weight
    net = nn.Sequential(first, second)
    fst.convert(net, "fst")
    folded = fst.fold(net)
    assert folded[0].weight is folded[1].weight
    input = torch.randn(1, 8, 5, 5)
    torch.testing.assert_close(folded(input), net.eval()(input))


def _tied(*layers):
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    return nn.Sequential(*layers)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    ("strategies", "others"),
    [({"1": "srste"}, "embedding"), ({"0": "srste"}, "dense"), ({"0": "srste", "1": "tsm"}, "tsm")],
    ids=["embedding", "excluded", "two_strategies"],
)
def test_fold_refuses_to_untie(strategies, others, inplace):
    """The tie was made after the conversion, which refuses it too."""
    net = nn.Sequential(nn.Embedding(8, 8) if others == "embedding" else nn.Linear(8, 8))
    net.append(nn.Linear(8, 8))
    for name, strategy in strategies.items():
        fst.convert(net, strategy, include=name)
    net[1].weight = net[0].weight
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with pytest.raises(ValueError, match=r"'0\.weight' and '1\.weight' are one Parameter"):
        fst.fold(net, inplace=inplace)
    assert len(fst.sparse_layers(net)) == len(strategies)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_a_fold_with_tied_biases_keeps_the_tie():
    net = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
    net[1].bias = net[2].bias = net[0].bias
    fst.convert(net, "srste", include="0")
    folded = fst.fold(net)
    assert folded[0].bias is folded[1].bias is folded[2].bias


def test_fold_of_frozen_tied_weights():
    net = _tied(*(nn.Linear(8, 8) for _ in range(2)))
    fst.convert(net, "srste", layers="linear")
    net[0].weight.requires_grad_(False)
    folded = fst.fold(net)
    assert folded[0].weight is folded[1].weight and not folded[0].weight.requires_grad
    assert torch.equal(folded[0].weight, net[0].effective_weight())


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "wrap, unwrap",
    [
        (nn.utils.weight_norm, nn.utils.remove_weight_norm),
        (lambda layer: prune.l1_unstructured(layer, "weight", 9), prune.remove),
        (nn.utils.parametrizations.weight_norm, parametrize.remove_parametrizations),
    ],
    ids=["weight_norm-hook", "prune", "parametrization"],
)
def test_fold_refuses_computed_weights(wrap, unwrap):
    """From S(W) in their place the folded layer would compute another weight again."""
    model = nn.Sequential(nn.Conv2d(8, 8, 3)).eval()
    fst.convert(model, "srste")
    wrap(model[0])
    with torch.no_grad():
        model(torch.randn(1, 8, 8, 8))
    with pytest.raises(ValueError, match="layer '0': its weight is computed"):
        fst.fold(model)
    unwrap(model[0], *([] if unwrap is nn.utils.remove_weight_norm else ["weight"]))
    input = torch.randn(1, 8, 8, 8)
    torch.testing.assert_close(fst.fold(model)(input), model(input))


def test_fold_needs_a_converted_model():
    with pytest.raises(ValueError, match="convert"):
        fst.fold(three_convolutions())
