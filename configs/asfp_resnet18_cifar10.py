"""ASFP: up to 30 % of the filters zeroed after each epoch; ResNet-18 on CIFAR-10, 60 epochs."""

_base_ = "dense_resnet18_cifar10.py"

sparsity = dict(strategy="asfp", exclude="*downsample*")
