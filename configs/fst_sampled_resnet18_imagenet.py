"""Weight gradients from half of the positions, 2:4 weights; ResNet-18 on ImageNet, 120 epochs."""

_base_ = "dense_resnet18_imagenet.py"

sparsity = dict(strategy="fst_sampled")
