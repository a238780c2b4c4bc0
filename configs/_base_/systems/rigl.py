"""RigL: unstructured, half of the weights from start to end, ERK densities."""

sparsity = dict(strategy="rigl")
