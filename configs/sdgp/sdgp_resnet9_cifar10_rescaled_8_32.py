"""SDGP rescaled 8:32, ResNet-9 on CIFAR-10, 150 epochs (README: 95.3 %)."""

_base_ = "sdgp_resnet9_cifar10_dense.py"

sparsity = dict(strategy="sdgp", n=8, m=32, rule="magnitude_rescaled")
