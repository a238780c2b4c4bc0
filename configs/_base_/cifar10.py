"""CIFAR-10 in data/cifar10, held in memory, and a classifier."""

model = dict(
    type="Classifier",
    architecture=dict(source="fst", name="resnet9", num_classes=10),
    loss=dict(label_smoothing=0.1),
    data_preprocessor=dict(
        type="ImagePreprocessor",
        mean=[125.307, 122.961, 113.8575],
        std=[51.5865, 50.847, 51.255],
        # a square of 4 pixels becomes the mean
        random_erasing=dict(probability=1.0, min_area=1 / 64, max_area=1 / 64, min_aspect=1.0),
    ),
    test_time_augmentation="flip",
)

train_dataloader = dict(
    batch_size=512,
    num_workers=2,
    persistent_workers=True,
    drop_last=True,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(
        type="CIFAR10",
        data_root="data/cifar10",
        split="train",
        transforms=[
            dict(type="RandomHorizontalFlip"),
            dict(type="RandomCrop", size=32, padding=2),
        ],
    ),
)
val_dataloader = dict(
    batch_size=512,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="CIFAR10", data_root="data/cifar10", split="test"),
)
test_dataloader = val_dataloader

val_evaluator = dict(type="Accuracy", topk=(1,))
test_evaluator = val_evaluator

val_cfg = dict()
test_cfg = dict()
