"""ResNet-18 on CIFAR-10, 60 epochs."""

_base_ = ["cifar10.py", "runtime.py"]

model = dict(architecture=dict(name="resnet18_cifar"))

train_cfg = dict(by_epoch=True, max_epochs=60, val_interval=1)
train_dataloader = dict(batch_size=128)
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=5e-4))
param_scheduler = [
    dict(type="CosineAnnealingLR", T_max=60, eta_min=0.0, end=60, convert_to_iter_based=True)
]
