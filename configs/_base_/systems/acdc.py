"""AC/DC: 2:4 and dense phases in turn."""

sparsity = dict(strategy="acdc")
