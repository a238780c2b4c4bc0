"""SDGP rescaled 2:16, ResNet-9 on CIFAR-10, 150 epochs (README: 95.1 %)."""

_base_ = "sdgp_resnet9_cifar10_dense.py"

sparsity = dict(strategy="sdgp", n=2, m=16, rule="magnitude_rescaled")
