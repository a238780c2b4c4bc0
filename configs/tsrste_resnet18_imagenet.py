"""T-SR-STE: transposable 2:4 weights, unbiased 2:4 output gradients, dense in the end.

ResNet-18 on ImageNet, 120 epochs.
"""

_base_ = ["_base_/fst_imagenet.py", "_base_/systems/tsrste.py"]
