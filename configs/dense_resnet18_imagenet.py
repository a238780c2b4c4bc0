"""Dense ResNet-18 on ImageNet, 120 epochs: the baseline of FST Table 3 (71.2 %)."""

_base_ = "_base_/fst_imagenet.py"

model = dict(architecture=dict(name="resnet18"))
sparsity = dict(strategy="dense")
