"""meProp: the top half of each sample's output gradients."""

sparsity = dict(strategy="meprop")
