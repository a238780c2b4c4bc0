"""The backends of each operation, one class each."""

from fst.backends.registry import register_operation

register_operation("prune_weight", "S(W) and S(Wᵀ)")
register_operation("prune_grad_output", "N:M pruning of grad_output along channels or positions")
register_operation("prune_columns", "N:M pruning of the input's columns along positions (FST)")
register_operation("output", "Y = W·X with the pruned weight")
register_operation("grad_input", "dX = Wᵀ·dY, over all output positions or a list of them")
register_operation("grad_weight", "dW = dY·Xᵀ, over all output positions or a list of them")

from fst.ops.backends import (  # noqa: E402
    columns,
    library,
    lists_cpp,
    lists_torch,
    prune_cpp,
    prune_torch,
    prune_triton,
    strided,
    zeros_maps,
    zeros_weight,
)

__all__ = [
    "columns",
    "library",
    "lists_cpp",
    "lists_torch",
    "prune_cpp",
    "prune_torch",
    "prune_triton",
    "strided",
    "zeros_maps",
    "zeros_weight",
]
