"""AC/DC: 2:4 and dense phases in turn.

ResNet-18 on ImageNet, 120 epochs.
"""

_base_ = ["_base_/fst_imagenet.py", "_base_/systems/acdc.py"]
