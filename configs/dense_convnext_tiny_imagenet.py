"""Dense ConvNeXt-T on ImageNet, 300 epochs by its recipe: the baseline."""

_base_ = "_base_/convnext_tiny_imagenet.py"

sparsity = dict(strategy="dense", layers="linear")
