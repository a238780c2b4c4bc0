"""Dense ViT-S/16 on ImageNet, 300 epochs by DeiT's recipe: the baseline."""

_base_ = "_base_/vit_small_imagenet.py"

sparsity = dict(strategy="dense", layers="linear")
