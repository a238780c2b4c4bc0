"""Dense ResNet-18 on ImageNet, 120 epochs: the baseline of FST Table 3 (71.2 %)."""

_base_ = ["_base_/fst_imagenet.py", "_base_/systems/dense.py"]
