"""Small networks of the bundled configurations, in plain PyTorch and built by plain functions."""

from fst.models.digits import digits_net
from fst.models.resnet9 import resnet9
from fst.models.resnet18_cifar import resnet18_cifar

__all__ = ["digits_net", "resnet18_cifar", "resnet9"]
