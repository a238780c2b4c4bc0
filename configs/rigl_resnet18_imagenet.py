"""RigL: unstructured, half of the weights from start to end, ERK densities.

ResNet-18 on ImageNet, 120 epochs.
"""

_base_ = "dense_resnet18_imagenet.py"

sparsity = dict(strategy="rigl")
