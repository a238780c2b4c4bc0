"""A data set of drawn rectangles in VOC and COCO format, and detectors small enough for it."""

import json
from pathlib import Path

import cv2
import numpy as np

CLASSES = ("RBC", "WBC", "Platelets")  # bccd's, so that either data set serves a config
COLORS = ((40, 40, 220), (200, 60, 40), (40, 200, 60))
TRAIN, VAL = 8, 4
OBJECT = """<object><name>{}</name><difficult>0</difficult><bndbox><xmin>{}</xmin><ymin>{}</ymin>\
<xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"""
XML = """<annotation><size><width>{}</width><height>{}</height><depth>3</depth></size>{}\
</annotation>"""


def draw_images(folder, height=96, width=128):
    """`TRAIN` + `VAL` images of three to five filled rectangles each, the class being the color.

    In VOC's files, and in COCO's <split>.json.
    """
    for part in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / part).mkdir(parents=True)
    random = np.random.default_rng(0)
    for split, count in (("train", TRAIN), ("val", VAL)):
        coco = {"images": [], "annotations": [], "categories": []}
        coco["categories"] = [{"id": i + 1, "name": name} for i, name in enumerate(CLASSES)]
        names = [f"drawn_{index + (split == 'val') * TRAIN:03d}" for index in range(count)]
        (folder / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(names) + "\n")
        for number, name in enumerate(names, 1):
            image = random.integers(90, 120, (height, width, 3)).astype(np.uint8)
            file = {"id": number, "file_name": f"{name}.jpg", "width": width, "height": height}
            coco["images"].append(file)
            objects = ""
            for place in random.permutation(6)[: random.integers(3, 6)]:  # cells of a 2 x 3 grid
                top, left = int(place // 3 * height // 2 + 4), int(place % 3 * width // 3 + 4)
                h, w = map(int, random.integers(18, 38, 2))
                kind = int(random.integers(len(CLASSES)))
                image[top : top + h, left : left + w] = COLORS[kind]
                objects += OBJECT.format(CLASSES[kind], left, top, left + w, top + h)
                box = {"bbox": [left, top, w, h], "area": w * h, "iscrowd": 0}
                identity = {"id": len(coco["annotations"]) + 1, "image_id": number}
                coco["annotations"].append({**identity, "category_id": kind + 1, **box})
            cv2.imwrite(str(folder / "JPEGImages" / f"{name}.jpg"), image)
            (folder / "Annotations" / f"{name}.xml").write_text(XML.format(width, height, objects))
        (folder / f"{split}.json").write_text(json.dumps(coco))
    return folder


SSD = """
_base_ = "mmdet::pascal_voc/ssd300_voc0712.py"
model = dict(
    backbone=dict(
        _delete_=True, type="ResNet", depth=18, base_channels=8, out_indices=(1, 2), num_stages=3,
        strides=(1, 2, 2), dilations=(1, 1, 1), norm_eval=False,
    ),
    neck=dict(
        in_channels=(16, 32), out_channels=(16, 32, 16, 16),
        level_strides=(2, 1), level_paddings=(1, 0),
    ),
    bbox_head=dict(
        num_classes=3, in_channels=(16, 32, 16, 16),
        anchor_generator=dict(
            _delete_=True, type="SSDAnchorGenerator", scale_major=False, input_size=96,
            strides=[8, 16, 32, 96], ratios=[[2], [2, 3], [2, 3], [2]],
            min_sizes=[15, 30, 50, 70], max_sizes=[30, 50, 70, 90],
        ),
    ),
)
"""

SSD_TRAIN_TRANSFORMS = """
    dict(type="Expand", mean=[123.675, 116.28, 103.53], to_rgb=True, ratio_range=(1, 2)),
    dict(type="MinIoURandomCrop", min_ious=(0.1, 0.5, 0.9), min_crop_size=0.5),
    dict(type="Resize", scale=(96, 96), keep_ratio=False),
    dict(type="RandomFlip", prob=0.5),
    dict(
        type="PhotoMetricDistortion", brightness_delta=32, contrast_range=(0.5, 1.5),
        saturation_range=(0.5, 1.5), hue_delta=18,
    ),
"""
SSD_RESIZE = 'dict(type="Resize", scale=(96, 96), keep_ratio=False),'

FASTER_RCNN = """
_base_ = "mmdet::pascal_voc/faster-rcnn_r50_fpn_1x_voc0712.py"
model = dict(
    backbone=dict(depth=18, base_channels=8, frozen_stages=1, norm_eval=True, init_cfg=None),
    neck=dict(in_channels=[8, 16, 32, 64], out_channels=16),
    rpn_head=dict(in_channels=16, feat_channels=16, anchor_generator=dict(scales=[4])),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=16, finest_scale=14),
        bbox_head=dict(in_channels=16, fc_out_channels=32, num_classes=3),
    ),
    train_cfg=dict(
        rpn_proposal=dict(nms_pre=100, max_per_img=40),
        rpn=dict(sampler=dict(num=64)),
        rcnn=dict(sampler=dict(num=32)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=100, max_per_img=40)),
)
"""
RCNN_RESIZE = 'dict(type="Resize", scale=(128, 96), keep_ratio=True),'

DETECTORS = {
    "ssd": (SSD, SSD_TRAIN_TRANSFORMS, SSD_RESIZE),
    "faster-rcnn": (FASTER_RCNN, RCNN_RESIZE + 'dict(type="RandomFlip", prob=0.5),', RCNN_RESIZE),
}

FORMATS = {
    "voc": (
        'type="VOCDataset", ann_file="ImageSets/Main/{split}.txt",'
        ' data_prefix=dict(sub_data_root="")',
        'type="VOCMetric", metric="mAP", eval_mode="area"',
    ),
    "coco": (
        'type="CocoDataset", ann_file="{split}.json", data_prefix=dict(img="JPEGImages/")',
        'type="CocoMetric", metric="bbox", ann_file="{root}/val.json"',
    ),
}

RUN = """
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    {train_transforms}
    dict(type="PackDetInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    {test_transforms}
    dict(type="LoadAnnotations", with_bbox=True),
    dict(
        type="PackDetInputs",
        meta_keys=("img_id", "img_path", "ori_shape", "img_shape", "scale_factor"),
    ),
]
metainfo = dict(classes=("RBC", "WBC", "Platelets"))
data_root = "{root}"
train_dataloader = dict(
    batch_size=2, num_workers=0, persistent_workers=False,
    dataset=dict(
        _delete_=True, data_root=data_root, {train_data}, metainfo=metainfo,
        filter_cfg=dict(filter_empty_gt=True), pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    num_workers=0, persistent_workers=False,
    dataset=dict(
        _delete_=True, data_root=data_root, {val_data}, metainfo=metainfo, test_mode=True,
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(_delete_=True, {metric})
test_evaluator = val_evaluator
train_cfg = dict(max_epochs=2, val_interval=9)
optim_wrapper = dict(optimizer=dict(lr={lr}), clip_grad=dict(max_norm=10, norm_type=2))
param_scheduler = [dict(type="LinearLR", start_factor=0.3, by_epoch=False, begin=0, end=3)]
default_hooks = dict(logger=dict(interval=1))
custom_hooks = []
randomness = dict(seed=3)
"""


def config_text(detector, root, format="voc", sparsity="None", lr=0.01, extra=""):
    """The text of a config: "ssd" or "faster-rcnn", data at `root` in "voc" or "coco" format."""
    model, train_transforms, test_transforms = DETECTORS[detector]
    data, metric = FORMATS[format]
    run = RUN.format(
        train_transforms=train_transforms.strip(),
        test_transforms=test_transforms,
        root=Path(root).as_posix(),
        train_data=data.format(split="train"),
        val_data=data.format(split="val"),
        metric=metric.format(root=Path(root).as_posix()),
        lr=lr,
    )
    line = f"sparsity = {sparsity}\n" if sparsity != "None" else ""
    return model + run + line + extra
