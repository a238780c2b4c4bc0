"""MaxQ: 2:4 weights with factors of filters and places, fewer and fewer dense groups.

ResNet-18 on ImageNet, 120 epochs.
"""

_base_ = ["_base_/fst_imagenet.py", "_base_/systems/maxq.py"]
