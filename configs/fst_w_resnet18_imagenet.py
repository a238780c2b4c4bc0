"""FST without S(X), ResNet-18 on ImageNet, 120 epochs (FST Table 3: 71.3 %)."""

_base_ = ["_base_/fst_imagenet.py", "_base_/systems/fst_w.py"]
