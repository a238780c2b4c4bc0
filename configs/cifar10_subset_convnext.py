"""For a comparison on a CPU: a small ConvNeXt, 10,000 images of CIFAR-10, 10 epochs."""

_base_ = "cifar10_subset_vit.py"

model = dict(
    architecture=dict(
        _delete_=True,
        source="timm",
        name="convnext_tiny",
        num_classes=10,
        patch_size=2,
        depths=(1, 1, 2, 1),
        dims=(16, 32, 64, 128),
        ls_init_value=None,  # 1e-6 as published needs a longer training
    )
)
