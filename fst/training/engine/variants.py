"""Changes of published trainings to a network: its initial weights, its strided layers."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

INITIALISATIONS = ("kaiming_uniform",)
LEAST_BLURRED = 16  # input channels


def initialise_convolutions(model: nn.Module) -> None:
    """Draw the weights of convolutions with more than three input channels from U(−b, b), b² = 6 /
    fan-in (He et al. 2015 for ReLU).

    So does SDGP's conversion (McDanel et al. 2022, `convert_model` of the official code), which
    makes these layers anew. PyTorch's own default has b² = 1 / fan-in.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.in_channels > 3:
            nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")


def blur_strided_convolutions(model: nn.Module) -> None:
    """Put a binomial 3×3 filter in front of each strided convolution of 16 input channels or more.

    As ffcv's ImageNet training and SDGP's do (after Zhang, "Making Convolutional Networks
    Shift-Invariant Again", ICML 2019): the filter has stride 1 and zero padding. The convolution
    at "NAME" becomes "NAME.conv".
    """
    from timm.layers import BlurPool2d

    for name, module in list(model.named_modules()):
        strided = isinstance(module, nn.Conv2d) and max(module.stride) > 1
        if strided and module.in_channels >= LEAST_BLURRED:
            blur = BlurPool2d(module.in_channels, filt_size=3, stride=1, pad_mode="constant")
            model.set_submodule(name, nn.Sequential(OrderedDict(blur=blur, conv=module)))
