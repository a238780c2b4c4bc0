"""SDGP magnitude 2:4, ResNet-9 on CIFAR-10, 150 epochs (README: 95.2 %)."""

_base_ = "sdgp_resnet9_cifar10_dense.py"

sparsity = dict(strategy="sdgp", n=2, m=4, rule="magnitude")
