"""SparseTrain: dense, counting ReLU's zeros; ResNet-18 on ImageNet, 120 epochs."""

_base_ = ["_base_/fst_imagenet.py", "_base_/systems/sparsetrain.py"]
