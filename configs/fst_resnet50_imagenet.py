"""FST, ResNet-50 on ImageNet, 120 epochs (FST Table 3: 77.0 %)."""

_base_ = "dense_resnet50_imagenet.py"

sparsity = dict(strategy="fst")
