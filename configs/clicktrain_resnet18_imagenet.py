"""ClickTrain: kernel patterns and whole kernels pruned; ResNet-18 on ImageNet, 120 epochs."""

_base_ = ["_base_/fst_imagenet.py", "_base_/systems/clicktrain.py"]
