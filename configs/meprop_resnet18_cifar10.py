"""meProp: the top half of each sample's output gradients; ResNet-18 on CIFAR-10, 60 epochs."""

_base_ = ["_base_/resnet18_cifar10.py", "_base_/systems/meprop.py"]
