"""MVUE: 2:4 output gradients in the weight gradient, exact in the mean.

ResNet-18 on CIFAR-10, 60 epochs.
"""

_base_ = ["_base_/resnet18_cifar10.py", "_base_/systems/mvue.py"]
