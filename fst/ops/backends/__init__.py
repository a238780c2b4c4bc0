"""A file for each backend, with its kernels' wrappers; importing the package registers them."""

import importlib
import pkgutil

from fst.backends.registry import register_operation

register_operation("prune_weight", "S(W) and S(Wᵀ)")
register_operation("prune_grad_output", "N:M pruning of grad_output along channels or positions")
register_operation("prune_columns", "N:M pruning of the input's columns along positions (FST)")
register_operation("output", "Y = W·X with the pruned weight")
register_operation("grad_input", "dX = Wᵀ·dY, over all output positions or a list of them")
register_operation("packed", "a layer of fst.pack with what follows it, or several layers")
register_operation("grad_weight", "dW = dY·Xᵀ, over all output positions or a list of them")

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
