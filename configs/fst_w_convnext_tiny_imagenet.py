"""FST without S(X) in its pointwise layers: ConvNeXt-T on ImageNet, 300 epochs by its recipe."""

_base_ = "_base_/convnext_tiny_imagenet.py"

sparsity = dict(strategy="fst_w", layers="linear")
