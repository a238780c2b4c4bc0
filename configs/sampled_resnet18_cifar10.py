"""Weight gradients from half of the positions, dense weights; ResNet-18 on CIFAR-10, 60 epochs."""

_base_ = "dense_resnet18_cifar10.py"

sparsity = dict(strategy="sampled")
