"""ResNet-9 for 32×32 images, the CIFAR-10 network of SDGP.

Paper: McDanel et al., "Accelerating DNN Training with Structured Data Gradient Pruning", 2022.
The architecture is ffcv's CIFAR-10 network, which goes back to Kakao Brain's torchskeleton.
"""

from torch import Tensor, nn


def conv_norm_relu(
    in_channels: int, out_channels: int, kernel_size: int = 3, stride: int = 1, padding: int = 1
) -> nn.Sequential:
    """A convolution without bias, batch normalisation and ReLU."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


class Residual(nn.Module):
    """``x + body(x)``, nothing applied after the sum."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class ResNet9(nn.Module):
    """Eight convolutions, a global maximum, a linear layer without bias, and scaled logits."""

    logit_scale = 0.2

    def __init__(self, num_classes: int = 10, in_channels: int = 3, width: int = 128) -> None:
        super().__init__()
        w1, w2, w4 = width, 2 * width, 4 * width
        self.features = nn.Sequential(
            conv_norm_relu(in_channels, w1),
            conv_norm_relu(w1, w2, kernel_size=5, stride=2, padding=2),
            Residual(nn.Sequential(conv_norm_relu(w2, w2), conv_norm_relu(w2, w2))),
            conv_norm_relu(w2, w4),
            nn.MaxPool2d(2),
            Residual(nn.Sequential(conv_norm_relu(w4, w4), conv_norm_relu(w4, w4))),
            conv_norm_relu(w4, w2, padding=0),
        )
        self.head = nn.Linear(w2, num_classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.features(x).amax(dim=(2, 3))
        return self.logit_scale * self.head(pooled)


def resnet9(num_classes: int = 10, in_channels: int = 3, width: int = 128) -> ResNet9:
    """ResNet-9; `width` is the number of channels of the first convolution (published: 128)."""
    return ResNet9(num_classes, in_channels, width)
