"""Dense RegNetX-400MF on ImageNet, 88 epochs: SDGP's baseline (SDGP Table I: 73.3 %)."""

_base_ = "../_base_/sdgp_imagenet.py"

model = dict(blur_pool=True, architecture=dict(name="regnet_x_400mf"))
sparsity = dict(strategy="dense")
