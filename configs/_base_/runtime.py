"""Logging, checkpoints and the seed: what all recipes share."""

default_hooks = dict(
    logger=dict(type="LoggerHook", interval=100),
    checkpoint=dict(type="CheckpointHook", interval=1, max_keep_ckpts=2),
)
randomness = dict(seed=0)
