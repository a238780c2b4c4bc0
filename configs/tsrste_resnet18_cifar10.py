"""T-SR-STE: transposable 2:4 weights, unbiased 2:4 output gradients, dense in the end.

ResNet-18 on CIFAR-10, 60 epochs.
"""

_base_ = ["_base_/resnet18_cifar10.py", "_base_/systems/tsrste.py"]
