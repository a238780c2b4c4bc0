"""SSD300 (VGG16) on any data set in VOC's format: set data_root."""

_base_ = ["_base_/runtime.py", "_base_/voc_format.py", "_base_/ssd300.py"]

train_dataloader = dict(dataset=dict(pipeline={{_base_.train_pipeline}}))
val_dataloader = dict(dataset=dict(pipeline={{_base_.test_pipeline}}))
test_dataloader = dict(dataset=dict(pipeline={{_base_.test_pipeline}}))

sparsity = dict(strategy="fst")
env_cfg = dict(cudnn_benchmark=True)  # images have one size
