"""ClickTrain: kernel patterns and whole kernels; downsampling shortcuts stay whole."""

sparsity = dict(strategy="clicktrain", exclude="*downsample*")
