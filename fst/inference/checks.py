"""Which layers can be packed, and which calls PyTorch's own operators compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

PLAIN_TENSORS = (Tensor, nn.Parameter, type(None))


def is_hooked(module: nn.Module) -> bool:
    """True if a call runs more than the module's own forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def is_watched(*operands: Any) -> bool:
    """True where autocast, a tracer, a mode, a transform or another kind of tensor needs torch's
    own operators.
    """
    if torch.compiler.is_compiling():
        return torch.is_autocast_enabled("cpu")
    return (
        any(type(x) not in PLAIN_TENSORS for x in operands)
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )


def refuses_packing(layer: nn.Module) -> str:
    """The reason why a layer cannot be packed; "" if it can."""
    if type(layer) not in (nn.Conv2d, nn.Linear):
        return f"a {type(layer).__name__}, whose own code computes something else"
    if not isinstance(layer._parameters.get("weight"), Tensor):
        return "its weight is computed from other parameters: remove the parametrization first"
    if is_hooked(layer):
        return "it has forward hooks"
    return refuses_padding(layer)


def refuses_padding(layer: nn.Module) -> str:
    """The reason why the products cannot pad as the layer does; "" if they can."""
    if not isinstance(layer, nn.Conv2d):
        return ""
    if layer.padding_mode != "zeros":
        return f"padding_mode={layer.padding_mode!r}"
    reach = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    if layer.padding == "same" and any(r % 2 for r in reach):
        return "padding that is not symmetric"
    return ""
