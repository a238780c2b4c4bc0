"""scikit-learn's bundled digits at 16 pixels: no download, seconds per run on two CPU cores."""

_base_ = "_base_/runtime.py"

model = dict(
    type="Classifier",
    architecture=dict(source="fst", name="digits_net", num_classes=10),
    loss=dict(label_smoothing=0.1),
    data_preprocessor=dict(type="ImagePreprocessor", mean=[78.0], std=[81.0]),
    channels_last=True,
)
sparsity = dict(strategy="fst")

train_dataloader = dict(
    batch_size=64,
    num_workers=0,
    drop_last=True,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(
        type="Digits",
        split="train",
        size=16,
        transforms=[dict(type="RandomCrop", size=16, padding=1)],
    ),
)
val_dataloader = dict(
    batch_size=359,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="Digits", split="test", size=16),
)
test_dataloader = val_dataloader

val_evaluator = dict(type="Accuracy", topk=(1,))
test_evaluator = val_evaluator

train_cfg = dict(by_epoch=True, max_epochs=8, val_interval=1)
val_cfg = dict()
test_cfg = dict()

optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=5e-4))
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-2, end=1, convert_to_iter_based=True),
    dict(
        type="CosineAnnealingLR",
        T_max=7,
        eta_min=0.0,
        begin=1,
        end=8,
        convert_to_iter_based=True,
    ),
]
