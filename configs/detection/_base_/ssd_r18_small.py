"""SSD at 192 x 192 on half of a ResNet-18, from scratch: minutes per run on two CPU cores."""

model = dict(
    type="SingleStageDetector",
    data_preprocessor=dict(
        type="DetDataPreprocessor",
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
    ),
    backbone=dict(
        type="ResNet",
        depth=18,
        base_channels=32,
        num_stages=3,
        strides=(1, 2, 2),
        dilations=(1, 1, 1),
        out_indices=(1, 2),
        norm_eval=False,
    ),
    neck=dict(
        type="SSDNeck",
        in_channels=(64, 128),
        out_channels=(64, 128, 128),
        level_strides=(2,),
        level_paddings=(1,),
        l2_norm_scale=None,
        norm_cfg=dict(type="BN"),
    ),
    bbox_head=dict(
        type="SSDHead",
        in_channels=(64, 128, 128),
        num_classes=3,
        anchor_generator=dict(
            type="SSDAnchorGenerator",
            scale_major=False,
            strides=[8, 16, 32],
            ratios=[[2], [2], [2]],
            min_sizes=[14, 30, 60],  # pixels of 192, for blood cells
            max_sizes=[30, 60, 110],
        ),
        bbox_coder=dict(
            type="DeltaXYWHBBoxCoder",
            target_means=[0.0, 0.0, 0.0, 0.0],
            target_stds=[0.1, 0.1, 0.2, 0.2],
        ),
    ),
    train_cfg=dict(
        assigner=dict(
            type="MaxIoUAssigner",
            pos_iou_thr=0.5,
            neg_iou_thr=0.5,
            min_pos_iou=0.0,
            ignore_iof_thr=-1,
            gt_max_assign_all=False,
        ),
        sampler=dict(type="PseudoSampler"),
        smoothl1_beta=1.0,
        allowed_border=-1,
        pos_weight=-1,
        neg_pos_ratio=3,
        debug=False,
    ),
    test_cfg=dict(
        nms_pre=1000,
        nms=dict(type="nms", iou_threshold=0.45),
        min_bbox_size=0,
        score_thr=0.02,
        max_per_img=100,
    ),
)

train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="MinIoURandomCrop", min_ious=(0.3, 0.5, 0.7, 0.9), min_crop_size=0.5),
    dict(type="Resize", scale=(192, 192), keep_ratio=False),
    dict(type="RandomFlip", prob=0.75, direction=["horizontal", "vertical", "diagonal"]),
    dict(type="PhotoMetricDistortion", hue_delta=9),
    dict(type="PackDetInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=(192, 192), keep_ratio=False),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(
        type="PackDetInputs",
        meta_keys=("img_id", "img_path", "ori_shape", "img_shape", "scale_factor"),
    ),
]

optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.02, momentum=0.9, weight_decay=5e-4))
