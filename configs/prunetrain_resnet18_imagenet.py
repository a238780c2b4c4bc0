"""PruneTrain: channels removed every 5 epochs; ResNet-18 on ImageNet, 120 epochs, one GPU.

FST Table 3 has ResNet-50 alone, 75.0 %.
"""

_base_ = "dense_resnet18_imagenet.py"

sparsity = dict(strategy="prunetrain", interval=5)
