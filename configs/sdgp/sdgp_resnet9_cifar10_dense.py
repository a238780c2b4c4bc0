"""Dense ResNet-9 on CIFAR-10, 150 epochs: SDGP's baseline (README: 95.3 %)."""

_base_ = "../_base_/sdgp_cifar10.py"

sparsity = dict(strategy="dense")
