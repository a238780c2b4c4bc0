"""MaxQ: 2:4 weights with factors of filters and places, fewer and fewer dense groups.

ResNet-18 on CIFAR-10, 60 epochs.
"""

_base_ = ["_base_/resnet18_cifar10.py", "_base_/systems/maxq.py"]
