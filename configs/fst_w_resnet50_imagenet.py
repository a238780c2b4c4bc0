"""FST without S(X), ResNet-50 on ImageNet, 120 epochs (FST Table 3: 77.1 %)."""

_base_ = "dense_resnet50_imagenet.py"

sparsity = dict(strategy="fst_w")
