"""FST with a dense weight gradient; groups along im2col, as in the paper."""

sparsity = dict(strategy="fst_w", literal=True)
