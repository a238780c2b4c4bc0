"""SDGP's CIFAR-10 recipe: 150 epochs, the learning rate linear to 0.5 at epoch 5, then to 0.

Flip, translation by up to 2 pixels, cutout of 4 pixels, label smoothing 0.1, flip averaging in
validation. All parameters have weight decay, those of normalisation layers too: the published
script exempts parameters by the substring "bn", which no name in its network contains. The
published runs used fp16 (--amp, with --cfg-options optim_wrapper.dtype=float16).
"""

_base_ = ["cifar10.py", "runtime.py"]

train_cfg = dict(by_epoch=True, max_epochs=150, val_interval=1)
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.5, momentum=0.9, weight_decay=5e-4))
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-4, end=5, convert_to_iter_based=True),
    dict(
        type="LinearLR",
        start_factor=1.0,
        end_factor=0.0,
        begin=5,
        end=150,
        convert_to_iter_based=True,
    ),
]
