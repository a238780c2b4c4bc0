"""PruneTrain: channels removed every 5 epochs; ResNet-18 on ImageNet, 120 epochs, one GPU.

FST Table 3 has ResNet-50 alone, 75.0 %.
"""

_base_ = ["_base_/fst_imagenet.py", "_base_/systems/prunetrain.py"]
