"""SDGP: output gradients 2:4 in grad_input; ResNet-18 on CIFAR-10, 60 epochs."""

_base_ = "_base_/resnet18_cifar10.py"

sparsity = dict(strategy="sdgp")
