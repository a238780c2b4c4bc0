"""SSD300 (VGG16, pretrained) for any data set: MMDetection's model and pipelines, 120 epochs."""

_base_ = "mmdet::_base_/models/ssd300.py"

train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="Expand", mean=[123.675, 116.28, 103.53], to_rgb=True, ratio_range=(1, 4)),
    dict(type="MinIoURandomCrop", min_ious=(0.1, 0.3, 0.5, 0.7, 0.9), min_crop_size=0.3),
    dict(type="Resize", scale=(300, 300), keep_ratio=False),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PhotoMetricDistortion"),
    dict(type="PackDetInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=(300, 300), keep_ratio=False),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(
        type="PackDetInputs",
        meta_keys=("img_id", "img_path", "ori_shape", "img_shape", "scale_factor"),
    ),
]

train_cfg = dict(by_epoch=True, max_epochs=120, val_interval=5)
val_cfg = dict()
test_cfg = dict()
optim_wrapper = dict(optimizer=dict(type="SGD", lr=1e-3, momentum=0.9, weight_decay=5e-4))
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, by_epoch=False, begin=0, end=500),
    dict(type="MultiStepLR", milestones=[80, 100], gamma=0.1),
]
