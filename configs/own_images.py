"""ResNet-18 from scratch on your own images in data_root/{train,val}/<class>/.

The number of outputs is the number of class folders. The image sizes are the three numbers below.
"""

_base_ = ["_base_/imagenet.py", "_base_/runtime.py"]

train_size, resized, val_size = (
    128,
    146,
    128,
)  # pixels: training crops; val images: shorter side, crop
epochs = 30

data_root = "data/mine"
sparsity = dict(strategy="srste")

train_cfg = dict(by_epoch=True, max_epochs=epochs, val_interval=5)
train_dataloader = dict(
    batch_size=32,
    num_workers=2,
    pin_memory=False,
    dataset=dict(
        transforms=[
            dict(type="RandomResizedCrop", size=train_size),
            dict(type="RandomHorizontalFlip"),
        ]
    ),
)
val_dataloader = dict(
    batch_size=32,
    num_workers=2,
    pin_memory=False,
    dataset=dict(
        transforms=[dict(type="Resize", size=resized), dict(type="CenterCrop", size=val_size)]
    ),
)
test_dataloader = val_dataloader

optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.05, momentum=0.9, weight_decay=5e-4))
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-2, end=1, convert_to_iter_based=True),
    dict(
        type="CosineAnnealingLR",
        T_max=epochs - 1,
        eta_min=0.0,
        begin=1,
        end=epochs,
        convert_to_iter_based=True,
    ),
]
