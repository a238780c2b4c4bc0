"""SparseTrain: dense; zeros of ReLU are skipped where a backend does it."""

sparsity = dict(strategy="sparsetrain")
