"""ReSprop: half of each output gradient is reused."""

sparsity = dict(strategy="resprop")
