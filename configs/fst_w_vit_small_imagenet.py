"""FST without S(X) in the linear layers: ViT-S/16 on ImageNet, 300 epochs by DeiT's recipe."""

_base_ = "_base_/vit_small_imagenet.py"

sparsity = dict(strategy="fst_w", layers="linear")
