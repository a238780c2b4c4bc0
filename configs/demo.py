"""The training of `make demo`: digits among clutter, no download, seconds per run on two cores."""

_base_ = "demo_digits.py"

model = dict(
    architecture=dict(width=32),
    data_preprocessor=dict(mean=[36.0], std=[59.0]),
)
sparsity = dict(strategy="srste")

clutter = dict(type="ClutteredDigits", size=24, fragments=2, side=4, noise=32)
shifts = [dict(type="RandomCrop", size=24, padding=2)]
train_dataloader = dict(dataset=dict(**clutter, transforms=shifts))
val_dataloader = dict(dataset=dict(**clutter, scenes=2))
test_dataloader = val_dataloader

train_cfg = dict(max_epochs=6)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-2, end=1, convert_to_iter_based=True),
    dict(
        type="CosineAnnealingLR",
        T_max=5,
        eta_min=0.0,
        begin=1,
        end=6,
        convert_to_iter_based=True,
    ),
]
