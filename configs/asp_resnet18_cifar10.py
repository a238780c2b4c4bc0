"""ASP: the 2:4 mask of a dense model retrained; ResNet-18 on CIFAR-10, 60 epochs.

Needs the checkpoint of dense_resnet18_cifar10.py:
--cfg-options load_from=work_dirs/dense_resnet18_cifar10/epoch_60.pth
"""

_base_ = ["_base_/resnet18_cifar10.py", "_base_/systems/asp.py"]
