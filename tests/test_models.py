"""Shapes, sizes and published properties of the bundled networks."""

import pytest
import torch
from torch import nn

from fst import models


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_resnet9_is_the_published_network() -> None:
    model = models.resnet9()
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert [
        (c.in_channels, c.out_channels, c.kernel_size[0], c.stride[0], c.padding[0], c.bias)
        for c in convs
    ] == [
        (3, 128, 3, 1, 1, None),
        (128, 256, 5, 2, 2, None),
        (256, 256, 3, 1, 1, None),
        (256, 256, 3, 1, 1, None),
        (256, 512, 3, 1, 1, None),
        (512, 512, 3, 1, 1, None),
        (512, 512, 3, 1, 1, None),
        (512, 256, 3, 1, 0, None),
    ]
    weights = sum(c.weight.numel() for c in convs)
    norms = 2 * (128 + 3 * 256 + 3 * 512 + 256)
    assert weights == 9_080_192
    assert count_parameters(model) == weights + norms + 256 * 10


def test_resnet9_maps_and_logit_scale() -> None:
    model = models.resnet9(width=8).eval()
    sizes = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda _m, _x, y: sizes.append(y.shape[-1]))
    x = torch.randn(2, 3, 32, 32)
    logits = model(x)
    assert sizes == [32, 16, 16, 16, 16, 8, 8, 6]
    pooled = model.features(x).flatten(2).max(dim=2).values
    torch.testing.assert_close(logits, 0.2 * pooled @ model.head.weight.T)


def test_resnet18_cifar_size_and_maps() -> None:
    model = models.resnet18_cifar()
    assert count_parameters(model) == 11_173_962
    assert len([m for m in model.modules() if isinstance(m, nn.Conv2d)]) == 20
    small = models.resnet18_cifar(width=8)
    maps = []
    small.layer4.register_forward_hook(lambda _m, _x, y: maps.append(tuple(y.shape)))
    assert small(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert maps == [(2, 64, 4, 4)]


@pytest.mark.parametrize("name", ["digits_net", "resnet18_cifar", "resnet9"])
def test_networks_train_and_take_their_options(name: str) -> None:
    channels, size = (1, 8) if name == "digits_net" else (3, 32)
    model = getattr(models, name)(num_classes=7, width=4)
    x = torch.randn(2, channels, size, size)
    logits = model(x)
    assert logits.shape == (2, 7)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
