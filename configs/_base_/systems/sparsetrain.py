"""SparseTrain: dense, counting ReLU's zeros."""

sparsity = dict(strategy="sparsetrain")
