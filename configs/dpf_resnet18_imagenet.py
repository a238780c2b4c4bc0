"""DPF: unstructured, 50 % of the weights pruned from half of the training on.

ResNet-18 on ImageNet, 120 epochs.
"""

_base_ = "dense_resnet18_imagenet.py"

sparsity = dict(strategy="dpf")
