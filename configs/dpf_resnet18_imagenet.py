"""DPF: unstructured, 50 % of the weights pruned from three quarters of the training on.

ResNet-18 on ImageNet, 120 epochs.
"""

_base_ = ["_base_/fst_imagenet.py", "_base_/systems/dpf.py"]
