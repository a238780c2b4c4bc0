"""ReSprop, ResNet-18 on ImageNet, 120 epochs (FST Table 3: 69.8 %)."""

_base_ = "dense_resnet18_imagenet.py"

sparsity = dict(strategy="resprop")
