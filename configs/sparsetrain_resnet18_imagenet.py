"""SparseTrain: dense, counting ReLU's zeros; ResNet-18 on ImageNet, 120 epochs."""

_base_ = "dense_resnet18_imagenet.py"

sparsity = dict(strategy="sparsetrain")
