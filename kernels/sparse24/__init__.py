"""Convolutions on 2:4 sparse tensor cores (``mma.sp``, sm_80 and later): S(W) forwards, S(Wᵀ) back.

- `layout`: what a packed weight looks like, in plain PyTorch; `pack.h` is the same on a GPU.
- `plan`: which positions and taps each GEMM of a convolution multiplies.
- `convolve.h`: the implicit GEMM; `device.h` holds the instructions it is made of.
- `extension`: builds and calls them.
"""

from . import layout, plan

__all__ = ["layout", "plan"]
