"""S-STE: 2:4 weights by a soft threshold, unbiased 2:4 output gradients.

ResNet-18 on ImageNet, 120 epochs.
"""

_base_ = ["_base_/fst_imagenet.py", "_base_/systems/sste.py"]
