"""SDGP rescaled 1:8, ResNet-9 on CIFAR-10, 150 epochs (README: 94.7 %)."""

_base_ = "sdgp_resnet9_cifar10_dense.py"

sparsity = dict(strategy="sdgp", n=1, m=8, rule="magnitude_rescaled")
