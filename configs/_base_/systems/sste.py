"""S-STE: 2:4 weights by a soft threshold, unbiased 2:4 output gradients."""

sparsity = dict(strategy="sste")
