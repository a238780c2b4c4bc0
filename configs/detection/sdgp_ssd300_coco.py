"""SSD300 (VGG16) on COCO 2017: gradients pruned (SDGP)."""

_base_ = "_base_/ssd300_coco.py"

sparsity = dict(strategy="sdgp")
