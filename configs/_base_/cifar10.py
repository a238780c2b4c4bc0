"""CIFAR-10 in data/cifar10, held in memory (on the GPU if there is one), and a classifier."""

model = dict(
    type="Classifier",
    architecture=dict(source="fst", name="resnet9", num_classes=10),
    loss=dict(label_smoothing=0.1),
    data_preprocessor=dict(
        type="ImagePreprocessor",
        mean=[125.307, 122.961, 113.8575],
        std=[51.5865, 50.847, 51.255],
        flip=0.5,
        translate=2,
        cutout=4,
    ),
    test_time_augmentation="flip",
)

train_dataloader = dict(
    batch_size=512,
    num_workers=0,
    drop_last=True,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(type="CIFAR10", data_root="data/cifar10", split="train", device="auto"),
)
val_dataloader = dict(
    batch_size=512,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="CIFAR10", data_root="data/cifar10", split="test", device="auto"),
)
test_dataloader = val_dataloader

val_evaluator = dict(type="Accuracy", topk=(1,))
test_evaluator = val_evaluator

val_cfg = dict()
test_cfg = dict()
