"""SdGf: 3:4, then 2:4 weights."""

sparsity = dict(strategy="sdgf")
