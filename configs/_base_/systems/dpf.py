"""DPF: unstructured, sparsity growing to 50 % of the weights."""

sparsity = dict(strategy="dpf")
