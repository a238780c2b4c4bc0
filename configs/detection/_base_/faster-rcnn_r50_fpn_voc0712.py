"""Faster R-CNN (ResNet-50, FPN), PASCAL VOC 07+12, MMDetection's recipe: data in data/VOCdevkit."""

_base_ = "mmdet::pascal_voc/faster-rcnn_r50_fpn_1x_voc0712.py"

visualizer = dict(vis_backends=[dict(type="LocalVisBackend"), dict(type="TensorboardVisBackend")])
default_hooks = dict(checkpoint=dict(max_keep_ckpts=3))
