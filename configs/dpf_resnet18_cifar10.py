"""DPF: unstructured, 50 % of the weights pruned from half of the training on.

ResNet-18 on CIFAR-10, 60 epochs.
"""

_base_ = "dense_resnet18_cifar10.py"

sparsity = dict(strategy="dpf")
