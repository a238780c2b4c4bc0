"""FST without S(X), ResNet-18 on ImageNet, 120 epochs (FST Table 3: 71.3 %)."""

_base_ = "dense_resnet18_imagenet.py"

sparsity = dict(strategy="fst_w")
