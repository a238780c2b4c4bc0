"""S-STE: 2:4 weights by a soft threshold, unbiased 2:4 output gradients.

ResNet-18 on CIFAR-10, 60 epochs.
"""

_base_ = ["_base_/resnet18_cifar10.py", "_base_/systems/sste.py"]
