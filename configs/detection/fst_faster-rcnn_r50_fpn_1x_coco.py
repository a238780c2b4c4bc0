"""Faster R-CNN (ResNet-50, FPN) on COCO 2017, 12 epochs: sparse in both passes (FST)."""

_base_ = "_base_/faster-rcnn_r50_fpn_1x_coco.py"

sparsity = dict(strategy="fst")
