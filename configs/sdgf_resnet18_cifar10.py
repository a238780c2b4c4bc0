"""SdGf: 3:4, then 2:4 weights.

ResNet-18 on CIFAR-10, 60 epochs.
"""

_base_ = ["_base_/resnet18_cifar10.py", "_base_/systems/sdgf.py"]
