"""SSD300 (VGG16) on PASCAL VOC 07+12, MMDetection's recipe: data in data/VOCdevkit."""

_base_ = "mmdet::pascal_voc/ssd300_voc0712.py"

visualizer = dict(vis_backends=[dict(type="LocalVisBackend"), dict(type="TensorboardVisBackend")])
default_hooks = dict(checkpoint=dict(max_keep_ckpts=3))
env_cfg = dict(cudnn_benchmark=True)  # images have one size
