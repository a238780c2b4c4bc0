"""AC/DC: 2:4 and dense phases in turn.

ResNet-18 on CIFAR-10, 60 epochs.
"""

_base_ = ["_base_/resnet18_cifar10.py", "_base_/systems/acdc.py"]
