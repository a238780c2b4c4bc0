"""SDGP's CIFAR-10 recipe: 150 epochs, the learning rate linear to 0.5 at epoch 2, then to 0.

As its published script runs, which is not always what its configurations say:

- The learning rate peaks at epoch 2: the script reads lr.lr_peak_epoch, whose default is 2, and the
  configurations have training.lr_peak_epoch: 5, which nothing reads.
- Convolutions but the first are drawn from kaiming_uniform, in the dense baseline too.
- Flip; translation by up to 2 pixels; cutout of 4 pixels wholly inside the image; label smoothing
  0.1; flip averaging in validation. The script wants a translation filled with the mean, but
  ffcv ignored that until March 2022, after SDGP was published, and left memory as it came, mostly
  black, which translations bring in here.
- All parameters have weight decay, those of normalisation layers too: parameters are exempt by the
  substring "bn", which no name in its network contains.
- fp16 (--amp, with --cfg-options optim_wrapper.dtype=float16).
"""

_base_ = ["cifar10.py", "runtime.py"]

model = dict(initialisation="kaiming_uniform")

train_cfg = dict(by_epoch=True, max_epochs=150, val_interval=1)
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.5, momentum=0.9, weight_decay=5e-4))
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-4, end=2, convert_to_iter_based=True),
    dict(
        type="LinearLR",
        start_factor=1.0,
        end_factor=0.0,
        begin=2,
        end=150,
        convert_to_iter_based=True,
    ),
]
