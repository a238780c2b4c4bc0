"""GPU kernels behind `fst.backends`: imported on first use, never by ``import fst``."""
