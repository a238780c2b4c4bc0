"""ImageNet (ILSVRC2012) in data/imagenet/{train,val}/<wnid>/, 224 pixels, and a classifier."""

data_root = "data/imagenet"

model = dict(
    type="Classifier",
    architecture=dict(source="torchvision", name="resnet18", num_classes=1000),
    loss=dict(label_smoothing=0.1),
    data_preprocessor=dict(
        type="ImagePreprocessor",
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
    ),
)

train_dataloader = dict(
    batch_size=256,
    num_workers=8,
    persistent_workers=True,
    pin_memory=True,
    drop_last=True,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(
        type="ImageFolder",
        split="train",
        transforms=[
            dict(type="RandomResizedCrop", size=224),
            dict(type="RandomHorizontalFlip"),
        ],
    ),
)
val_dataloader = dict(
    batch_size=256,
    num_workers=8,
    persistent_workers=True,
    pin_memory=True,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(
        type="ImageFolder",
        split="val",
        transforms=[dict(type="Resize", size=256), dict(type="CenterCrop", size=224)],
    ),
)
test_dataloader = val_dataloader

val_evaluator = dict(type="Accuracy", topk=(1, 5))
test_evaluator = val_evaluator

val_cfg = dict()
test_cfg = dict()
