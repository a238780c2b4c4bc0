"""A data set in Pascal VOC's layout below `data_root`:

JPEGImages/<name>.jpg (or .png, ...), Annotations/<name>.xml, ImageSets/Main/<split>.txt
"""

data_root = "data/bccd"
classes = "auto"  # all names in the training annotations, sorted; or a list of names

train_dataloader = dict(
    batch_size=8,
    num_workers=2,
    persistent_workers=True,
    drop_last=True,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(
        type="VOCFormatDataset",
        ann_file="ImageSets/Main/train.txt",
        data_prefix=dict(sub_data_root=""),
        filter_cfg=dict(filter_empty_gt=True),
    ),
)
val_dataloader = dict(
    batch_size=8,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(
        type="VOCFormatDataset",
        ann_file="ImageSets/Main/val.txt",
        data_prefix=dict(sub_data_root=""),
        test_mode=True,
    ),
)
test_dataloader = dict(
    batch_size=8,
    num_workers=2,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(
        type="VOCFormatDataset",
        ann_file="ImageSets/Main/test.txt",
        data_prefix=dict(sub_data_root=""),
        test_mode=True,
    ),
)
val_evaluator = dict(type="VOCMetric", metric="mAP", eval_mode="area")
test_evaluator = val_evaluator
