"""Weight gradients from half of the positions, 2:4 weights; ResNet-18 on CIFAR-10, 60 epochs."""

_base_ = "dense_resnet18_cifar10.py"

sparsity = dict(strategy="fst_sampled")
