"""Faster R-CNN (ResNet-50, FPN) on COCO 2017, MMDetection's recipe: data in data/coco."""

_base_ = "mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py"

bad_annotations = "skip"  # COCO 2017 itself has boxes without area
visualizer = dict(vis_backends=[dict(type="LocalVisBackend"), dict(type="TensorboardVisBackend")])
default_hooks = dict(checkpoint=dict(max_keep_ckpts=3))
