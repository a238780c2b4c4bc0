"""For a comparison on a CPU: a small ViT, 10,000 images of CIFAR-10, 10 epochs."""

_base_ = "cifar10_subset.py"

model = dict(
    architecture=dict(
        _delete_=True,
        source="timm",
        name="vit_tiny_patch16_224",
        num_classes=10,
        img_size=32,
        patch_size=4,
        embed_dim=64,
        depth=3,
        num_heads=2,
    )
)

train_cfg = dict(val_interval=10)
optim_wrapper = dict(
    _delete_=True,
    optimizer=dict(type="AdamW", lr=2e-3, weight_decay=0.05),
    paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0),
)

sparsity = dict(strategy="fst", layers="linear")
