"""SDGP's ImageNet recipe, which is ffcv's with 88 epochs (McDanel et al. 2022, Section IV).

Images grow from 160 to 192 pixels in epochs 65 to 76 and are validated at 256 with flip averaging.
The learning rate rises linearly for 2 epochs, then falls linearly to 0. As in the published script:

- No weight decay for parameters with "bn" in their names: all normalisation layers of ResNet-18 and
  ResNet-50 but those of shortcuts, none of RegNetX-400MF's.
- A blur filter in front of strided convolutions (blur_pool), but for the dense ResNet-18.
- Pruned networks draw the convolutions' weights, but the first layer's, from kaiming_uniform; dense
  ones keep torchvision's.
- 4 GPUs with the batch size below on each, in fp16 (--amp, with --cfg-options
  optim_wrapper.dtype=float16).

Images are read as JPEG files, not from ffcv's own format.
"""

_base_ = ["imagenet.py", "runtime.py"]

model = dict(test_time_augmentation="flip", channels_last=True)

train_cfg = dict(by_epoch=True, max_epochs=88, val_interval=1)
train_dataloader = dict(
    batch_size=1024,
    dataset=dict(
        transforms=[
            dict(
                type="ProgressiveRandomResizedCrop",
                min_size=160,
                max_size=192,
                start_epoch=65,
                end_epoch=76,
            ),
            dict(type="RandomHorizontalFlip"),
        ],
    ),
)
val_dataloader = dict(
    dataset=dict(transforms=[dict(type="Resize", size=293), dict(type="CenterCrop", size=256)])
)
test_dataloader = val_dataloader

optim_wrapper = dict(
    optimizer=dict(type="SGD", lr=1.0, momentum=0.9, weight_decay=5e-5),
    paramwise_cfg=dict(custom_keys={"bn": dict(decay_mult=0.0)}),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-4, end=2, convert_to_iter_based=True),
    dict(
        type="LinearLR",
        start_factor=1.0,
        end_factor=0.0,
        begin=2,
        end=88,
        convert_to_iter_based=True,
    ),
]
