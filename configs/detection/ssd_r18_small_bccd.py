"""SSD on half of a ResNet-18: 364 images of blood cells in data/bccd, in VOC's format."""

_base_ = [
    "_base_/runtime.py",
    "_base_/voc_format.py",
    "_base_/ssd_r18_small.py",
    "_base_/small_schedule.py",
]

train_dataloader = dict(dataset=dict(pipeline={{_base_.train_pipeline}}))
val_dataloader = dict(dataset=dict(pipeline={{_base_.test_pipeline}}))
test_dataloader = dict(dataset=dict(pipeline={{_base_.test_pipeline}}))

sparsity = dict(strategy="fst")
env_cfg = dict(cudnn_benchmark=True)  # images have one size
