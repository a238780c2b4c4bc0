"""FST as its paper computes it: groups along im2col, pairs along the flattened map.

Without ``literal`` groups run along input channels, which is what sparse inference kernels read.
"""

sparsity = dict(strategy="fst", literal=True)
