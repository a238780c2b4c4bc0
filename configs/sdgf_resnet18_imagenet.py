"""SdGf: 3:4, then 2:4 weights.

ResNet-18 on ImageNet, 120 epochs.
"""

_base_ = ["_base_/fst_imagenet.py", "_base_/systems/sdgf.py"]
