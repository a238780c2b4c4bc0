"""For a comparison on a CPU: narrow ResNet-9, 10,000 images of CIFAR-10, 10 epochs."""

_base_ = ["_base_/cifar10.py", "_base_/runtime.py"]

model = dict(architecture=dict(width=16))

train_dataloader = dict(batch_size=128, dataset=dict(subset=10000))
val_dataloader = dict(dataset=dict(subset=5000))
test_dataloader = val_dataloader

train_cfg = dict(by_epoch=True, max_epochs=10, val_interval=5)
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.2, momentum=0.9, weight_decay=5e-4))
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-2, end=2, convert_to_iter_based=True),
    dict(
        type="LinearLR",
        start_factor=1.0,
        end_factor=0.0,
        begin=2,
        end=10,
        convert_to_iter_based=True,
    ),
]

sparsity = dict(strategy="fst")
