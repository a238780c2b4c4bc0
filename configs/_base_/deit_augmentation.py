"""The augmentation and loss that DeiT and ConvNeXt share, on ImageNet at 224 pixels.

Random-resized crops with bicubic interpolation, flips and RandAugment (rand-m9-mstd0.5-inc1: two
operations of magnitude 9 ± 0.5), random erasing with probability 0.25 (pixel noise), mixup (0.8) or
cutmix (1.0) for every batch, label smoothing 0.1 within them. Validation: the shorter side to 256
pixels, bicubic, the central 224. By timm's own functions, as in the official codes:
https://github.com/facebookresearch/deit (datasets.py, the defaults of main.py) and
https://github.com/facebookresearch/ConvNeXt (the same files).
"""

_base_ = ["imagenet.py", "runtime.py"]

model = dict(
    loss=dict(_delete_=True, type="SoftTargetCrossEntropy"),
    data_preprocessor=dict(
        mixup=dict(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1),
        random_erasing=dict(probability=0.25, mode="pixel"),
    ),
)

train_dataloader = dict(
    dataset=dict(
        transforms=[
            dict(
                type="timm",
                input_size=224,
                is_training=True,
                auto_augment="rand-m9-mstd0.5-inc1",
                interpolation="bicubic",
            )
        ]
    )
)
val_dataloader = dict(
    dataset=dict(
        transforms=[
            dict(type="Resize", size=256, interpolation="bicubic"),
            dict(type="CenterCrop", size=224),
        ]
    )
)
test_dataloader = val_dataloader

train_cfg = dict(by_epoch=True, max_epochs=300, val_interval=1)
