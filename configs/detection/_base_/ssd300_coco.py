"""SSD300 (VGG16) on COCO 2017, MMDetection's recipe: data in data/coco."""

_base_ = "mmdet::ssd/ssd300_coco.py"

bad_annotations = "skip"  # COCO 2017 itself has boxes without area
visualizer = dict(vis_backends=[dict(type="LocalVisBackend"), dict(type="TensorboardVisBackend")])
default_hooks = dict(checkpoint=dict(max_keep_ckpts=3))
env_cfg = dict(cudnn_benchmark=True)  # images have one size
