"""Weight gradients from half of the positions, dense weights; ResNet-18 on ImageNet, 120 epochs."""

_base_ = "dense_resnet18_imagenet.py"

# On a CPU a layer samples only where that is faster; with FST_AUTOTUNE=0 every layer samples.
sparsity = dict(strategy="sampled")
