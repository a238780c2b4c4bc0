"""Dense ResNet-18 on ImageNet, 88 epochs: SDGP's baseline (SDGP Table I: 71.4 %)."""

_base_ = "../_base_/sdgp_imagenet.py"

model = dict(architecture=dict(name="resnet18"))
sparsity = dict(strategy="dense")
