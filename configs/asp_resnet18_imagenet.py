"""ASP: the 2:4 mask of a dense model, which is then trained again.

ResNet-18 on ImageNet, 120 epochs (FST Table 3: 70.7 %).

Needs the checkpoint of dense_resnet18_imagenet.py:
--cfg-options load_from=work_dirs/dense_resnet18_imagenet/epoch_120.pth
"""

_base_ = ["_base_/fst_imagenet.py", "_base_/systems/asp.py"]
