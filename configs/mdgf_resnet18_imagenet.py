"""MdGf: 2:4 weights, the others fading to zero.

ResNet-18 on ImageNet, 120 epochs.
"""

_base_ = ["_base_/fst_imagenet.py", "_base_/systems/mdgf.py"]
