"""A small network for scikit-learn's 8×8 digits: seconds per training run on a laptop's CPU."""

from torch import Tensor, nn

from fst.models.resnet9 import conv_norm_relu


class DigitsNet(nn.Module):
    """Four 3×3 convolutions with one pooling step, a global mean, and a linear layer."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1, width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            conv_norm_relu(in_channels, width),
            conv_norm_relu(width, 2 * width),
            nn.MaxPool2d(2),
            conv_norm_relu(2 * width, 4 * width),
            conv_norm_relu(4 * width, 4 * width),
        )
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean(dim=(2, 3)))


def digits_net(num_classes: int = 10, in_channels: int = 1, width: int = 32) -> DigitsNet:
    """The demo's network; `width` is the number of channels of the first convolution."""
    return DigitsNet(num_classes, in_channels, width)
