"""Nothing pruned."""

sparsity = dict(strategy="dense")
