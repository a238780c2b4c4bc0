"""Networks whose channels are added, concatenated, flattened, shuffled, and read in other ways."""

import torch
import torch.nn.functional as F
from torch import nn


def unequal(model, seed=0):
    """``model`` in float64, with channels that differ in every parameter and buffer."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point() and tensor.dim():
                noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.copy_((tensor + 0.1 * noise.abs()) * (0.5 * noise).exp())
    return model


class Auxiliary(nn.Module):
    """A head that only the training calls, and that reads channels in its own way."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 1)
        self.scale = nn.Parameter(torch.ones(16, 1, 1))

    def forward(self, x):
        x = self.first(x)
        if not self.training:
            return self.second(x)
        return self.second(x), (x * self.scale).flip(1)


class Everything(nn.Module):
    """A random walk through operations; each step takes earlier maps (N, C, 6, 6)."""

    def __init__(self, seed):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.layers, self.steps = nn.ModuleList(), []
        sizes = [3]
        for _ in range(12):
            kind = int(torch.randint(len(STEPS), (), generator=draw))
            source, other = torch.randint(len(sizes), (2,), generator=draw).tolist()
            source = len(sizes) - 1 if int(torch.randint(2, (), generator=draw)) else source
            twin = next(i for i in range(len(sizes)) if sizes[i] == sizes[source])
            make, size = STEPS[kind](sizes[source], sizes[other])
            self.layers.append(make or nn.Identity())
            self.steps.append((kind, source, other, twin))
            sizes.append(size)
        self.head = nn.Conv2d(sizes[-1], 4, 1)

    def forward(self, x):
        maps = [x]
        for layer, (kind, source, other, twin) in zip(self.layers, self.steps, strict=True):
            maps.append(CALLS[kind](layer, maps[source], maps[other], maps[twin]))
        return self.head(maps[-1]), maps[-1].mean((1, 2, 3))


class ChannelsLast(nn.Module):
    """LayerNorm and a two-layer perceptron over channels, with a shortcut and a scale."""

    def __init__(self, size):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 16), nn.Linear(16, size)
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x):
        y = self.down(F.gelu(self.up(self.norm(x.permute(0, 2, 3, 1)))))
        return x + (self.scale * y).permute(0, 3, 1, 2)


class Squeeze(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, size):
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(size, 8, 1), nn.Conv2d(8, size, 1)

    def forward(self, x):
        return x * self.fc2(self.fc1(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


def _convolution(size, _):
    return nn.Conv2d(size, 16, 3, padding=1), 16


STEPS = (
    _convolution,
    _convolution,
    lambda size, _: (nn.Conv2d(size, 24, 1), 24),
    lambda size, _: (nn.BatchNorm2d(size), size),
    lambda size, _: (nn.Conv2d(size, size, 3, padding=1, groups=size), size),
    lambda size, _: (nn.Conv2d(size, 2 * size, 1, groups=size), 2 * size),
    lambda size, _: (nn.ConvTranspose2d(size, 16, 3, padding=1), 16),
    lambda size, _: (nn.Conv2d(size, size, 1, groups=2 - size % 2), size),
    lambda size, _: (ChannelsLast(size), size),
    lambda size, _: (Squeeze(size), size),
    lambda size, other: (None, size + other),
    lambda size, _: (None, size),
    lambda size, _: (None, size),
    lambda size, _: (None, size // 2 + 1),
    lambda size, _: (None, size),
    lambda size, _: (None, size),
    lambda size, _: (nn.PReLU(size), size),
    lambda size, _: (nn.Linear(size * 36, 16 * 36), 16),
)


def _one(layer, x, *_):
    return layer(x)


CALLS = (
    *[_one] * 10,
    lambda _, x, other, __: torch.cat([x, other], 1),
    lambda _, x, __, twin: (x + twin).relu_(),
    lambda _, x, *__: torch.cat(x.chunk(2, 1)[::-1], 1),
    lambda _, x, *__: x[:, : x.shape[1] // 2 + 1],
    lambda _, x, *__: x.view(len(x), 2 - x.shape[1] % 2, -1, 6, 6).transpose(1, 2).flatten(1, 2),
    lambda _, x, *__: x.roll(1, 1) + F.max_pool2d(x, 3, 1, 1),
    _one,
    lambda layer, x, *_: layer(x.flatten(1)).unflatten(1, (-1, 6, 6)),
)
