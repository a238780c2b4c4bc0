"""For analyses on photographs on a CPU: a narrow ResNet-18 on ten classes of ImageNet.

Any selection of Imagenette in data/imagenette/{train,val}/<wnid>/. Trained on crops of 96 pixels
for ten epochs, validated at 224.
"""

_base_ = ["_base_/imagenet.py", "_base_/runtime.py"]

data_root = "data/imagenette"

model = dict(
    architecture=dict(source="timm", name="resnet18", num_classes=10, channels=(16, 32, 64, 128))
)
sparsity = dict(strategy="dense")

train_cfg = dict(by_epoch=True, max_epochs=10, val_interval=10)
train_dataloader = dict(
    batch_size=32,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        transforms=[
            dict(type="RandomResizedCrop", size=96),
            dict(type="RandomHorizontalFlip"),
        ]
    ),
)
val_dataloader = dict(
    batch_size=50,
    num_workers=0,
    persistent_workers=False,
)
test_dataloader = val_dataloader
val_evaluator = dict(topk=(1,))
test_evaluator = val_evaluator

optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=5e-4))
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-2, end=1, convert_to_iter_based=True),
    dict(
        type="CosineAnnealingLR",
        T_max=9,
        eta_min=0.0,
        begin=1,
        end=10,
        convert_to_iter_based=True,
    ),
]
