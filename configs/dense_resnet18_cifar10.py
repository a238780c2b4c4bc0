"""Dense ResNet-18 on CIFAR-10, 60 epochs, and the base of the other ResNet-18 recipes there."""

_base_ = ["_base_/resnet18_cifar10.py", "_base_/systems/dense.py"]
