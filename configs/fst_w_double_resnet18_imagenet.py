"""Double pruning: 2:4 weights, pruned once more along output channels in grad_input.

ResNet-18 on ImageNet, 120 epochs.
"""

_base_ = ["_base_/fst_imagenet.py", "_base_/systems/fst_w_double.py"]
