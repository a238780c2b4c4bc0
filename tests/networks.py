"""A small network, its batches and its gradients, shared by the tests of training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import fst
from fst.api.attach import Attachment
from tests.cases import error
from tests.strategy_settings import DEFAULTS, SETTINGS, Setting

TRAINED = tuple(
    row
    for row in SETTINGS
    if row in DEFAULTS
    or row.id in ("fst-flat", "fst-block2x2", "fst-phase_random", "fst-im2col", "fst-decoupled")
    or row.id in ("sdgp-random", "srste-random", "srste-dense_backward")
    or row.id in ("wx-alternating", "tsm-4:8")
)


def small_net(double: bool = True) -> nn.Sequential:
    """Two convolutions ("0" and "2") and a head ("4") for `batch`."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(72, 4)
    )
    return net.double() if double else net


def batch(seed: int = 0, size: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    """(size, 4, 5, 5)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, 5, 5, generator=generator, dtype=torch.float64).to(dtype)


def optimizer_for(net: nn.Module, lr: float, **of_sgd: Any) -> torch.optim.Optimizer:
    """SGD, or Adam where a layer's strategy needs it."""
    if "step" in {layer.strategy.name for layer in fst.sparse_layers(net).values()}:
        return torch.optim.Adam(net.parameters(), lr=lr)
    return torch.optim.SGD(net.parameters(), lr=lr, **of_sgd)


def attach(net: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Attachment:
    """`fst.attach` for a training of 20 steps in four epochs."""
    optimizer = optimizer or optimizer_for(net, lr=0.05)
    attachment = fst.attach(net, optimizer, total_steps=20, steps_per_epoch=5)
    attachment.report_loss(torch.tensor(1.0))
    return attachment


def gradients(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in net.named_parameters()}


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Optimizer steps, each with the `batch` of its number."""
    for step in steps:
        optimizer.zero_grad()
        net(batch(step)).square().mean().backward()
        optimizer.step()


def end_step(net: nn.Module) -> None:
    """An optimizer's step that changes no weight."""
    torch.optim.SGD(net.parameters(), lr=0.0).step()


def stepped_gradients(net: nn.Module) -> dict[str, Tensor]:
    """What an optimizer's step sees, which here changes no weight: the decay is in it."""
    seen: dict[str, Tensor] = {}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.update(gradients(net)))
    optimizer.step()
    return seen


def assert_close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12
) -> None:
    """Gradients by name, by their relative error."""
    assert actual.keys() == expected.keys()
    for name in expected:
        assert error(actual[name], expected[name]) <= tolerance, name


def decaying(model: nn.Module, strategy: str = "srste", decay: float = 0.5) -> nn.Module:
    """``model``, converted with a decay large enough to see."""
    fst.convert(model, fst.get_strategy(strategy, decay=decay))
    return model


def three_convolutions() -> nn.Sequential:
    """With three input channels, of stride 2, and in two groups; then a linear layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, bias=False),
        nn.Conv2d(16, 12, 1, groups=2, padding_mode="reflect"),
        nn.Flatten(),
        nn.Linear(12 * 9, 6),
    )


def seven_pixels() -> Tensor:
    """A batch for `three_convolutions`."""
    return torch.randn(2, 3, 7, 7)


def trained(row: Setting, include: list[str] | None = None) -> nn.Module:
    """`three_convolutions`, converted by a row of the settings table and trained for two steps."""
    net = three_convolutions()
    fst.convert(net, row.build(), include=include)
    fst.seed_random_rules(net, 1)
    optimizer = optimizer_for(net, lr=0.1)
    attach(net, optimizer)
    for _ in range(2):
        net(seven_pixels()).square().mean().backward()
        optimizer.step()
    return net.eval()


class Block(nn.Module):
    """Residual, as torchvision's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


class Inverted(nn.Module):
    """MobileNetV2's block; ``parts``: which of its three convolutions it has."""

    channels = 32  # of the depthwise one

    def __init__(self, outside: int = 8, parts: str = "abc", stride: int = 1) -> None:
        super().__init__()
        inside = self.channels
        first, last = (outside if part in parts else inside for part in "ac")
        layers: list[nn.Module] = []
        if "a" in parts:
            layers += [nn.Conv2d(first, inside, 1, bias=False), nn.BatchNorm2d(inside), nn.ReLU6()]
        depthwise = nn.Conv2d(inside, inside, 3, stride, 1, groups=inside)
        layers += [depthwise, nn.BatchNorm2d(inside), nn.SiLU()]
        if "c" in parts:
            layers += [nn.Conv2d(inside, last, 1, bias=False), nn.BatchNorm2d(last)]
        self.layers, self.adds = nn.Sequential(*layers), stride == 1 and first == last

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


def keep(model: nn.Module, n: int = 2, m: int = 4) -> nn.Module:
    """Zeros of N:M along input channels, where they fit; batch norms that do something."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear) and module.weight.shape[1] % m == 0:
            groups = module.weight.detach().unflatten(1, (-1, m))
            kept = torch.zeros_like(groups).scatter_(2, groups.abs().topk(n, 2).indices, 1.0)
            module.weight.data = (groups * kept).flatten(1, 2).contiguous()
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.0)
            nn.init.normal_(module.bias, 0, 0.1)
    return model.eval()


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


def identity_layer(strategy, channels=8):
    """A 1x1 layer and an input of which the output shows S(W)."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Conv2d(channels, channels, 1, bias=False)).double()
    fst.convert(layer, strategy)
    return layer, torch.eye(channels, dtype=torch.float64)[:, :, None, None]


def masks_of_steps(layer, unit, steps, between=lambda step: None):
    masks = []
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for step in range(steps):
        output = layer(unit)
        masks.append(output.detach()[:, :, 0, 0].T != 0)
        output.sum().backward()
        between(step)
        optimizer.step()
        with torch.no_grad():  # wholly different weights
            generator = torch.Generator().manual_seed(step)
            layer[0].weight.copy_(
                torch.randn(layer[0].weight.shape, generator=generator, dtype=torch.float64)
            )
    return masks
