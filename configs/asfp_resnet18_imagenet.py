"""ASFP: up to 30 % of the filters zeroed after each epoch in the end.

ResNet-18 on ImageNet, 120 epochs (FST Table 3: 68.0 %).
"""

_base_ = "dense_resnet18_imagenet.py"

sparsity = dict(strategy="asfp", exclude="*downsample*")
