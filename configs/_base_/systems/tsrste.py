"""T-SR-STE: transposable 2:4 weights, unbiased 2:4 output gradients, dense in the end."""

sparsity = dict(strategy="tsrste")
