"""RigL: unstructured, half of the weights from start to end, ERK densities.

ResNet-18 on ImageNet, 120 epochs.
"""

_base_ = ["_base_/fst_imagenet.py", "_base_/systems/rigl.py"]
