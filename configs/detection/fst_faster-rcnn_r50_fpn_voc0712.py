"""Faster R-CNN (ResNet-50, FPN) on PASCAL VOC 07+12: sparse in both passes (FST)."""

_base_ = "_base_/faster-rcnn_r50_fpn_voc0712.py"

sparsity = dict(strategy="fst")
