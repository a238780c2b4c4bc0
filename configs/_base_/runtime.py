"""Logging, checkpoints and the seed: what all recipes share."""

default_hooks = dict(
    logger=dict(type="LoggerHook", interval=100),
    checkpoint=dict(type="CheckpointHook", interval=1, max_keep_ckpts=2),
)
randomness = dict(seed=0)
# Images have one size. randomness.deterministic wins over it.
env_cfg = dict(cudnn_benchmark=True)
