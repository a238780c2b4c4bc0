"""`fst.metrics` in a loop: flat names, and the numbers of layers and of the whole model."""

import copy

import pytest
import torch
from torch import nn

import fst

NAMES = ("0", "2")


def network(strategy="srste", **options):
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())
    fst.convert(model, fst.get_strategy(strategy, **options))
    return model


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(4, 4, 8, 8)).square().mean().backward()
    optimizer.step()


def test_numbers_are_those_of_masks_and_gradients():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    first = fst.metrics(model)
    assert first == {"sparsity/density": 0.5, **{f"sparsity/density/{name}": 0.5 for name in NAMES}}
    before = {name: layer.output_mask() for name, layer in fst.sparse_layers(model).items()}
    step(model, optimizer)
    found = fst.metrics(model)
    changed = kept = squared = 0.0
    for name, layer in fst.sparse_layers(model).items():
        flips = (layer.output_mask() != before[name]).double()
        assert found[f"sparsity/mask_flip_rate/{name}"] == pytest.approx(float(flips.mean()))
        norm = float(layer.weight.grad.norm())
        assert found[f"sparsity/grad_norm/{name}"] == pytest.approx(norm)
        changed, kept, squared = changed + flips.sum(), kept + flips.numel(), squared + norm**2
    assert 0 < found["sparsity/mask_flip_rate"] == pytest.approx(float(changed / kept))
    assert found["sparsity/grad_norm"] == pytest.approx(squared**0.5)
    assert fst.metrics(model)["sparsity/mask_flip_rate"] == 0
    assert all(type(value) is float for value in found.values())


def test_looking_changes_nothing():
    watched = network()
    alone = copy.deepcopy(watched)
    for model in (watched, alone):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            step(model, optimizer)
            if model is watched:
                fst.metrics(model)
    for ours, theirs in zip(watched.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_each_model_is_watched_by_itself():
    model = network()
    fst.metrics(model)
    assert "sparsity/mask_flip_rate" not in fst.metrics(copy.deepcopy(model))
    assert "sparsity/mask_flip_rate" in fst.metrics(model)


def test_strategies_without_masks():
    model = network("sdgp")
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert {key.split("/")[0] for key in fst.metrics(model, prefix="")} == {"grad_norm"}


def test_an_unconverted_model_is_refused():
    with pytest.raises(ValueError, match="call fst.convert first"):
        fst.metrics(nn.Conv2d(4, 4, 1))
