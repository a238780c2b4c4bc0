"""MVUE: 2:4 output gradients in the weight gradient, exact in the mean.

ResNet-18 on ImageNet, 120 epochs.
"""

_base_ = ["_base_/fst_imagenet.py", "_base_/systems/mvue.py"]
