"""Double pruning: 2:4 weights, pruned once more along output channels in grad_input.

ResNet-18 on CIFAR-10, 60 epochs.
"""

_base_ = ["_base_/resnet18_cifar10.py", "_base_/systems/fst_w_double.py"]
