"""The C++ kernels for CPUs, where the installation has compiled them: they are never needed.

They are functions of pointers and sizes in a library without torch (`kernels/cpu.h`), called
through ctypes and registered as operators of torch, so that torch.compile takes them. They run in
as many threads as torch does, in threads of torch's OpenMP runtime. The functions ``refuses_...``
say why the kernels cannot read operands where they lie.
"""

from fst.ops.cpp.library import BACKEND, missing
from fst.ops.cpp.lists import (
    MOST_POSITIONS,
    draw_positions,
    list_grad_input,
    list_grad_weight,
    measure_positions,
    refuses_lists,
)
from fst.ops.cpp.pruning import (
    MOST_M,
    add_residual,
    adds_residual,
    prune_grad_output,
    prune_weight,
    refuses_grad_output,
    refuses_weight,
)
from fst.ops.cpp.zeros_maps import (
    maps_grad_input,
    maps_grad_weight,
    maps_output,
    nonzeros,
    refuses_maps,
)
from fst.ops.cpp.zeros_weight import refuses_zeros, zeros_grad_input, zeros_output

__all__ = [
    "BACKEND",
    "MOST_M",
    "MOST_POSITIONS",
    "add_residual",
    "adds_residual",
    "draw_positions",
    "list_grad_input",
    "list_grad_weight",
    "maps_grad_input",
    "maps_grad_weight",
    "maps_output",
    "measure_positions",
    "missing",
    "nonzeros",
    "prune_grad_output",
    "prune_weight",
    "refuses_grad_output",
    "refuses_lists",
    "refuses_maps",
    "refuses_weight",
    "refuses_zeros",
    "zeros_grad_input",
    "zeros_output",
]
