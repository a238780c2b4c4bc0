"""FST without S(X), ResNet-50 on ImageNet, 120 epochs (FST Table 3: 77.1 %)."""

_base_ = ["_base_/fst_imagenet.py", "_base_/systems/fst_w.py"]

model = dict(architecture=dict(name="resnet50"))
