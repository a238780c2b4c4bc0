"""SDGP rescaled 2:4, RegNetX-400MF on ImageNet, 88 epochs (SDGP Table I: 72.4 %)."""

_base_ = "sdgp_regnetx400mf_imagenet_dense.py"

model = dict(initialisation="kaiming_uniform")
sparsity = dict(strategy="sdgp", n=2, m=4, rule="magnitude_rescaled")
