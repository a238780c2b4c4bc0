"""Errors of pruned gradients against the slow float64 reference and against plain autograd."""

import copy

import errors
import pytest
import torch
import torch.nn.functional as F
from paper import Precision
from record import record_step
from saliency import saliency
from torch import nn

import fst
from tests.strategy_settings import SHIPPED


def net():
    torch.manual_seed(1)
    layers = (nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 3))
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.Dropout(0.3), layers[2]).double()


def loss(model, batch):
    return model(batch).pow(2).mean()


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, 6, 8, generator=generator, dtype=torch.float64) for _ in range(2)]


def relative(a, b):
    return float(((a - b).norm() / b.norm()).detach())


def pruned_magnitude(tensor, dim):
    """2:4 by magnitude, by sorting."""
    moved = tensor.movedim(dim, -1)
    groups = moved.reshape(*moved.shape[:-1], -1, 4)
    order = groups.abs().argsort(-1, descending=True)[..., :2]
    kept = torch.zeros_like(groups).scatter(-1, order, 1.0)
    return (groups * kept).reshape(moved.shape).movedim(-1, dim)


def test_dense_has_no_error(batches):
    found = saliency(net(), loss, batches, "dense")
    assert found.total.relative == pytest.approx(0, abs=1e-12)
    assert [layer.name for layer in found.layers] == ["0", "2", "4"]
    for layer in found.layers:
        for error in layer.errors.values():
            assert error == pytest.approx((0, 1, 1), abs=1e-12)
    assert "local grad_input" not in found.layers[0].errors


def test_sdgp_local_and_global_errors(batches):
    """Against a hand-written backward pass of the same network."""
    model = net()
    found = saliency(model, loss, batches[:1], "sdgp,rule=magnitude", seed=5)

    with torch.random.fork_rng():
        torch.manual_seed(5)
        record = record_step(model, lambda: loss(model, batches[0]))
    exact = {name: layer.calls[0] for name, layer in record.layers.items()}
    weights = {name: model.get_submodule(name).weight.detach() for name in exact}

    def grad_input(name, grad_output, prune):
        shape, padding = exact[name].input.shape, model.get_submodule(name).padding
        grad = pruned_magnitude(grad_output, 1) if prune else grad_output
        return nn.grad.conv2d_input(shape, weights[name], grad, padding=padding)

    by_name = {layer.name: layer.errors for layer in found.layers}
    for name in ("2", "4"):
        alone = grad_input(name, exact[name].grad_output, prune=True)
        error = by_name[name]["local grad_input"].relative
        assert error == pytest.approx(relative(alone, exact[name].grad_input))
        assert by_name[name]["local grad_weight"].relative == pytest.approx(0, abs=1e-12)
    last = grad_input("4", exact["4"].grad_output, prune=True)
    dropout = exact["4"].input / F.conv2d(
        exact["2"].input, weights["2"], model.get_submodule("2").bias, padding=1
    )
    middle = grad_input("2", last * dropout, prune=True)
    error = by_name["2"]["global grad_input"].relative
    assert error == pytest.approx(relative(middle, exact["2"].grad_input))
    wrong = nn.grad.conv2d_weight(exact["2"].input, weights["2"].shape, last * dropout, padding=1)
    right = record.layers["2"].grad_weight
    assert by_name["2"]["global grad_weight"].relative == pytest.approx(relative(wrong, right))
    assert by_name["4"]["global grad_weight"].relative == pytest.approx(0, abs=1e-12)
    assert error > by_name["4"]["global grad_input"].relative


def test_reference_forward_or_dense(batches):
    """Only the forward pass of `srste` with backward="dense" differs from the dense model."""
    label = "srste,backward=dense"
    assert saliency(net(), loss, batches, label).total.relative < 1e-12
    dense = saliency(net(), loss, batches, label, reference="dense", seed=2)
    model, changed = net(), net()
    fst.convert(changed, label, exclude=[])
    measured = []
    for number, batch in enumerate(batches):
        gradients = []
        for one in (changed, model):
            torch.manual_seed(2 + number)
            one.zero_grad()
            loss(one, batch).backward()
            gradients.append([p.grad for p in one.parameters()])
        measured.append(errors.error_of(*gradients))
    assert dense.total == pytest.approx(errors.mean(measured), rel=1e-6)
    with pytest.raises(ValueError, match="reference='own'"):
        saliency(net(), loss, batches, label, reference="own")


@pytest.mark.parametrize("name", SHIPPED)
def test_every_strategy_can_be_measured(name, batches):
    """Schedules, kept masks and random rules included; the model itself stays as it is."""
    model = net().train()
    before = copy.deepcopy(model.state_dict())
    found = saliency(model, loss, batches, name)
    # maxq's masks scale what they keep
    assert found.label == name and 0 <= found.total.relative < (100 if name == "maxq" else 1.5)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not fst.sparse_layers(model)


def test_low_precision_and_loss_scale(batches):
    images = [batch.float() for batch in batches]
    model = net().float()
    exact = saliency(model, loss, images, "dense")
    half = saliency(model, loss, images, "dense", precision=Precision(torch.bfloat16))
    assert exact.total.relative < 1e-6 < 1e-4 < half.total.relative < 0.1

    def tiny(one, batch):
        return loss(one, batch).float() * 1e-7

    lost, kept = (
        saliency(model, tiny, images, "dense", precision=Precision(torch.float16, scale))
        for scale in (1.0, 2.0**20)
    )
    assert lost.total.norm < 0.9 and kept.total.relative < 0.05
    for layer in kept.layers[1:]:
        assert all(error.relative < 0.05 for error in layer.errors.values())


def test_a_mask_is_kept_for_all_batches(batches):
    """A random forward mask is the same for the approximation and its reference."""
    found = saliency(net(), loss, batches, "srste,rule=random,backward=dense", seed=4)
    assert found.total.relative < 1e-12
