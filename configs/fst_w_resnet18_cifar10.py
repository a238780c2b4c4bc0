"""FST with a dense weight gradient; ResNet-18 on CIFAR-10, 60 epochs."""

_base_ = ["_base_/resnet18_cifar10.py", "_base_/systems/fst_w.py"]
