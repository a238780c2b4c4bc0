"""A data set in COCO's layout below `data_root`: one JSON file per split, images in one folder."""

data_root = "data/bccd"
classes = "auto"  # all categories of the training annotations, in file order; or a list of names

train_dataloader = dict(
    batch_size=8,
    num_workers=2,
    persistent_workers=True,
    drop_last=True,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(
        type="COCOFormatDataset",
        ann_file="train.json",
        data_prefix=dict(img="JPEGImages"),
        filter_cfg=dict(filter_empty_gt=True),
    ),
)
val_dataloader = dict(
    batch_size=8,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(
        type="COCOFormatDataset",
        ann_file="val.json",
        data_prefix=dict(img="JPEGImages"),
        test_mode=True,
    ),
)
test_dataloader = dict(
    batch_size=8,
    num_workers=2,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(
        type="COCOFormatDataset",
        ann_file="test.json",
        data_prefix=dict(img="JPEGImages"),
        test_mode=True,
    ),
)
# without ann_file: that of the data set
val_evaluator = dict(type="CocoMetric", metric="bbox")
test_evaluator = val_evaluator
