"""SDGP rescaled 16:32, ResNet-9 on CIFAR-10, 150 epochs (README: 95.3 %)."""

_base_ = "sdgp_resnet9_cifar10_dense.py"

sparsity = dict(strategy="sdgp", n=16, m=32, rule="magnitude_rescaled")
