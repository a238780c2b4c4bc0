"""RigL within groups: 2:4 weights from start to end, connections dropped and grown.

ResNet-18 on CIFAR-10, 60 epochs.
"""

_base_ = ["_base_/resnet18_cifar10.py", "_base_/systems/rigl_nm.py"]
