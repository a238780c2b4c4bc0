"""Dense ResNet-50 on ImageNet, 120 epochs: the baseline of FST Table 3 (77.3 %)."""

_base_ = ["_base_/fst_imagenet.py", "_base_/systems/dense.py"]

model = dict(architecture=dict(name="resnet50"))
