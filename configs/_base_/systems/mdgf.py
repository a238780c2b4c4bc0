"""MdGf: 2:4 weights, the others fading to zero."""

sparsity = dict(strategy="mdgf")
