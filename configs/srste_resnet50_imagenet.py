"""SR-STE, ResNet-50 on ImageNet, 120 epochs (FST Table 3: 77.0 %)."""

_base_ = ["_base_/fst_imagenet.py", "_base_/systems/srste.py"]

model = dict(architecture=dict(name="resnet50"))
