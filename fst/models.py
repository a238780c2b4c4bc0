"""Small networks of the bundled configurations, in plain PyTorch and built by plain functions."""

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["DigitsNet", "ResNet18Cifar", "ResNet9", "digits_net", "resnet18_cifar", "resnet9"]


def _conv_norm_relu(
    in_channels: int, out_channels: int, kernel_size: int = 3, stride: int = 1, padding: int = 1
) -> nn.Sequential:
    """A convolution without bias, batch normalisation and ReLU."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


class DigitsNet(nn.Module):
    """Four 3×3 convolutions with one pooling step, a global mean, and a linear layer."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1, width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _conv_norm_relu(in_channels, width),
            _conv_norm_relu(width, 2 * width),
            nn.MaxPool2d(2),
            _conv_norm_relu(2 * width, 4 * width),
            _conv_norm_relu(4 * width, 4 * width),
        )
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean(dim=(2, 3)))


def digits_net(num_classes: int = 10, in_channels: int = 1, width: int = 32) -> DigitsNet:
    """The demo's network; `width` is the number of channels of the first convolution."""
    return DigitsNet(num_classes, in_channels, width)


class Residual(nn.Module):
    """``x + body(x)``, nothing applied after the sum."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class ResNet9(nn.Module):
    """The CIFAR-10 network of SDGP (McDanel et al., "Accelerating DNN Training with Structured Data
    Gradient Pruning", 2022), which is ffcv's and goes back to Kakao Brain's torchskeleton.

    Eight convolutions, a global maximum, a linear layer without bias, and scaled logits.
    """

    logit_scale = 0.2

    def __init__(self, num_classes: int = 10, in_channels: int = 3, width: int = 128) -> None:
        super().__init__()
        w1, w2, w4 = width, 2 * width, 4 * width
        self.features = nn.Sequential(
            _conv_norm_relu(in_channels, w1),
            _conv_norm_relu(w1, w2, kernel_size=5, stride=2, padding=2),
            Residual(nn.Sequential(_conv_norm_relu(w2, w2), _conv_norm_relu(w2, w2))),
            _conv_norm_relu(w2, w4),
            nn.MaxPool2d(2),
            Residual(nn.Sequential(_conv_norm_relu(w4, w4), _conv_norm_relu(w4, w4))),
            _conv_norm_relu(w4, w2, padding=0),
        )
        self.head = nn.Linear(w2, num_classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.features(x).amax(dim=(2, 3))
        return self.logit_scale * self.head(pooled)


def resnet9(num_classes: int = 10, in_channels: int = 3, width: int = 128) -> ResNet9:
    """ResNet-9; `width` is the number of channels of the first convolution (published: 128)."""
    return ResNet9(num_classes, in_channels, width)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.downsample(x))


class ResNet18Cifar(nn.Module):
    """ResNet-18 (He et al. 2016) with the stem that the literature uses on CIFAR: 3×3, no pooling.

    Stem, four stages of two blocks, a global mean and a linear layer. Module names are
    torchvision's.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = self._stage(width, width, stride=1)
        self.layer2 = self._stage(width, 2 * width, stride=2)
        self.layer3 = self._stage(2 * width, 4 * width, stride=2)
        self.layer4 = self._stage(4 * width, 8 * width, stride=2)
        self.fc = nn.Linear(8 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @staticmethod
    def _stage(in_channels: int, channels: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            BasicBlock(in_channels, channels, stride), BasicBlock(channels, channels, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean(dim=(2, 3)))


def resnet18_cifar(num_classes: int = 10, in_channels: int = 3, width: int = 64) -> ResNet18Cifar:
    """ResNet-18 for CIFAR; `width` is the number of channels of the stem."""
    return ResNet18Cifar(num_classes, in_channels, width)
