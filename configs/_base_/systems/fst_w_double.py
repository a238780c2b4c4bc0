"""Double pruning: 2:4 weights, pruned once more along output channels in grad_input."""

sparsity = dict(strategy="fst_w", grad_input="double")
