"""MVUE: 2:4 output gradients in the weight gradient, exact in the mean."""

sparsity = dict(strategy="mvue")
