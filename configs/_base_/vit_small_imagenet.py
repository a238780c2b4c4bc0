"""ViT-S/16 on ImageNet by DeiT's recipe (Touvron et al., "Training data-efficient image
transformers & distillation through attention", ICML 2021, Table 9; DeiT-S without distillation).

300 epochs, 1,024 images per step over all GPUs, AdamW with learning rate 1e-3 (5e-4 per 512
images), weight decay 0.05 on matrices alone (not on biases, norms, position and class tokens),
five epochs of warm-up from 1e-6, a cosine to 1e-5, stochastic depth 0.1, EMA 0.99996. With k GPUs,
set train_dataloader.batch_size to 1024 / k. There is no decay of the learning rate by layer.

What differs: DeiT trains on each image in three augmentations at a time (repeated augmentation),
here on one; the official code validates the trained weights, here the averaged ones are validated;
its cosine begins at epoch 0 and has steps of an epoch, here it begins after the warm-up and has
steps of an iteration.
"""

_base_ = "deit_augmentation.py"

model = dict(
    architecture=dict(source="timm", name="vit_small_patch16_224", drop_path_rate=0.1),
)
custom_hooks = [dict(type="EMAHook", momentum=4e-5)]  # 1 - 0.99996

train_dataloader = dict(batch_size=1024)
optim_wrapper = dict(
    optimizer=dict(type="AdamW", lr=1e-3, weight_decay=0.05, betas=(0.9, 0.999), eps=1e-8),
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        flat_decay_mult=0.0,
        custom_keys={"pos_embed": dict(decay_mult=0.0), "cls_token": dict(decay_mult=0.0)},
    ),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, end=5, convert_to_iter_based=True),
    dict(
        type="CosineAnnealingLR",
        T_max=295,
        eta_min=1e-5,
        begin=5,
        end=300,
        convert_to_iter_based=True,
    ),
]
