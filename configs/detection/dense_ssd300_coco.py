"""SSD300 (VGG16) on COCO 2017: dense."""

_base_ = "_base_/ssd300_coco.py"

sparsity = dict(strategy="dense")
