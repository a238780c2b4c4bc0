"""FST as in its paper: all three GEMMs 2:4; ResNet-18 on CIFAR-10, 60 epochs."""

_base_ = ["_base_/resnet18_cifar10.py", "_base_/systems/fst.py"]
