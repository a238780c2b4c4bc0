"""SR-STE: 2:4 weights in the output GEMM, groups along input channels (Zhou et al. 2021)."""

sparsity = dict(strategy="srste")
