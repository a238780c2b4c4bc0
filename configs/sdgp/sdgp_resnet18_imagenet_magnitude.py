"""SDGP magnitude 2:4, ResNet-18 on ImageNet, 88 epochs (SDGP Table I: 70.9 %)."""

_base_ = "sdgp_resnet18_imagenet_dense.py"

model = dict(blur_pool=True, initialisation="kaiming_uniform")
sparsity = dict(strategy="sdgp", n=2, m=4, rule="magnitude")
