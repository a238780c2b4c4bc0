"""SDGP rescaled 4:32, ResNet-9 on CIFAR-10, 150 epochs (README: 94.9 %)."""

_base_ = "sdgp_resnet9_cifar10_dense.py"

sparsity = dict(strategy="sdgp", n=4, m=32, rule="magnitude_rescaled")
