"""STEP in its blocks' linear layers: ViT-S/16 on ImageNet, 300 epochs by DeiT's recipe (AdamW)."""

_base_ = "_base_/vit_small_imagenet.py"

sparsity = dict(strategy="step", layers="linear")
