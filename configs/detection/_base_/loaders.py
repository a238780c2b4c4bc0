"""The loaders of any data set."""

train_dataloader = dict(
    batch_size=8,
    num_workers=2,
    persistent_workers=True,
    drop_last=True,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(filter_cfg=dict(filter_empty_gt=True)),
)
val_dataloader = dict(
    batch_size=8,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(test_mode=True),
)
test_dataloader = dict(
    batch_size=8,
    num_workers=2,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(test_mode=True),
)
