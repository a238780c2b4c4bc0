"""RigL: unstructured, half of the weights from start to end, ERK densities.

ResNet-18 on CIFAR-10, 60 epochs.
"""

_base_ = ["_base_/resnet18_cifar10.py", "_base_/systems/rigl.py"]
