"""SDGP random 2:4, ResNet-50 on ImageNet, 88 epochs (SDGP Table I: 70.3 %)."""

_base_ = "sdgp_resnet50_imagenet_dense.py"

model = dict(initialisation="kaiming_uniform")
sparsity = dict(strategy="sdgp", n=2, m=4, rule="random")
