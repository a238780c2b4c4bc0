"""ConvNeXt-T on ImageNet by its own recipe (Liu et al., "A ConvNet for the 2020s", CVPR 2022,
Table 5; https://github.com/facebookresearch/ConvNeXt, TRAINING.md).

300 epochs, 4,096 images per step over all GPUs, AdamW with learning rate 4e-3, weight decay 0.05 on
matrices and convolutions alone (not on biases, norms and layer scales), 20 epochs of warm-up from
0, a cosine to 1e-6, stochastic depth 0.1, layer scale from 1e-6, EMA 0.9999. The decay of the
learning rate by layer belongs to its fine-tuning, not to this training. With k GPUs, set
train_dataloader.batch_size to 4096 / k; with fewer images at once, add
optim_wrapper.accumulative_counts, and the same number as the EMAHook's interval.
"""

_base_ = "deit_augmentation.py"

model = dict(
    architecture=dict(source="timm", name="convnext_tiny", drop_path_rate=0.1),
)
custom_hooks = [dict(type="EMAHook", momentum=1e-4)]  # 1 - 0.9999

train_dataloader = dict(batch_size=4096)
optim_wrapper = dict(
    optimizer=dict(type="AdamW", lr=4e-3, weight_decay=0.05, betas=(0.9, 0.999), eps=1e-8),
    paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0, flat_decay_mult=0.0),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-4, end=20, convert_to_iter_based=True),
    dict(
        type="CosineAnnealingLR",
        T_max=280,
        eta_min=1e-6,
        begin=20,
        end=300,
        convert_to_iter_based=True,
    ),
]
