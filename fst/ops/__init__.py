"""How a convolution's three GEMMs are computed."""

from fst.ops import backends as backends  # registers them
