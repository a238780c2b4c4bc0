"""RigL within groups: 2:4 weights from start to end, connections dropped and grown.

ResNet-18 on ImageNet, 120 epochs.
"""

_base_ = ["_base_/fst_imagenet.py", "_base_/systems/rigl_nm.py"]
