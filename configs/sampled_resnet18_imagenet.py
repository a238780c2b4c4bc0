"""Weight gradients from half of the positions, dense weights; ResNet-18 on ImageNet, 120 epochs."""

_base_ = "dense_resnet18_imagenet.py"

sparsity = dict(strategy="sampled")
