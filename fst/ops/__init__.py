"""How a convolution's three GEMMs are computed, and the reference that this is tested against."""

from fst.ops import programs as programs  # registers them
