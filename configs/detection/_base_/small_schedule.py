"""24 epochs, from scratch: warm-up and cosine."""

train_cfg = dict(by_epoch=True, max_epochs=24, val_interval=4)
val_cfg = dict()
test_cfg = dict()
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=100),
    dict(type="CosineAnnealingLR", T_max=24, eta_min=0.0, convert_to_iter_based=True),
]
