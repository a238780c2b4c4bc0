"""Computation of a convolution's three GEMMs."""

from fst.ops import backends as backends  # registers them
