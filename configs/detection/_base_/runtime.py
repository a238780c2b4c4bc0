"""Logging, checkpoints, drawing and the seed: what all detectors share."""

default_scope = "mmdet"

default_hooks = dict(
    timer=dict(type="IterTimerHook"),
    logger=dict(type="LoggerHook", interval=50),
    param_scheduler=dict(type="ParamSchedulerHook"),
    checkpoint=dict(type="CheckpointHook", interval=1, max_keep_ckpts=2),
    sampler_seed=dict(type="DistSamplerSeedHook"),
)
env_cfg = dict(mp_cfg=dict(mp_start_method="fork", opencv_num_threads=0))
visualizer = dict(
    type="DetLocalVisualizer",
    vis_backends=[dict(type="LocalVisBackend"), dict(type="TensorboardVisBackend")],
)
log_processor = dict(window_size=50, by_epoch=True)
randomness = dict(seed=0)
