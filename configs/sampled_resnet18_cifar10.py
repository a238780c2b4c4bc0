"""Weight gradients from half of the positions, dense weights; ResNet-18 on CIFAR-10, 60 epochs."""

_base_ = "dense_resnet18_cifar10.py"

# On a CPU a layer samples only where that is faster; with FST_AUTOTUNE=0 every layer samples.
sparsity = dict(strategy="sampled")
