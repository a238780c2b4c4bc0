"""SR-STE, ResNet-18 on ImageNet, 120 epochs (FST Table 3: 71.2 %)."""

_base_ = "dense_resnet18_imagenet.py"

sparsity = dict(strategy="srste")
