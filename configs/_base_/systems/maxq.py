"""MaxQ: 2:4 weights with factors of filters and places, fewer and fewer dense groups."""

sparsity = dict(strategy="maxq")
