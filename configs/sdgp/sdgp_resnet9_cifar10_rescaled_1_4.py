"""SDGP rescaled 1:4, ResNet-9 on CIFAR-10, 150 epochs (README: 95.1 %)."""

_base_ = "sdgp_resnet9_cifar10_dense.py"

sparsity = dict(strategy="sdgp", n=1, m=4, rule="magnitude_rescaled")
