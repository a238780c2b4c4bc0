"""FST's ImageNet recipe (Xu et al. 2022, "Implementation Details"; it follows SR-STE's).

120 epochs, 256 images per step over all GPUs, learning rate 0.1 -> 0 along a cosine after five
epochs of warm-up from 0, weight decay 7e-5 on all parameters, label smoothing 0.1, no colour
augmentation. FST follows SR-STE's hyper-parameters, whose 2:4 configuration has the warm-up; FST
itself does not mention it. The decay of 2e-4 that draws weights towards their pruned values is the
strategies' default. With k GPUs, set train_dataloader.batch_size to 256 / k.
"""

_base_ = ["imagenet.py", "runtime.py"]

train_cfg = dict(by_epoch=True, max_epochs=120, val_interval=1)
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=7e-5))
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-4, end=5, convert_to_iter_based=True),
    dict(
        type="CosineAnnealingLR",
        T_max=115,
        eta_min=0.0,
        begin=5,
        end=120,
        convert_to_iter_based=True,
    ),
]
