"""DPF: unstructured, 50 % of the weights pruned from three quarters of the training on.

ResNet-18 on CIFAR-10, 60 epochs.
"""

_base_ = ["_base_/resnet18_cifar10.py", "_base_/systems/dpf.py"]
