"""SSD300 (VGG16) on PASCAL VOC 07+12: dense."""

_base_ = "_base_/ssd300_voc0712.py"

sparsity = dict(strategy="dense")
