"""How a convolution's three GEMMs are computed."""

from fst.ops import programs as programs  # registers them
