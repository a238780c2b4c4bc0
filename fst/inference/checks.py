"""Which layers can be packed, and which calls a packed layer refuses or leaves to torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fst.basics.errors import UsageError

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
    """Why a layer cannot be packed, in words; "" if it can."""
    if type(layer) not in (nn.Conv2d, nn.Linear):
        return f"a {type(layer).__name__}, whose own code computes something else"
    if not isinstance(layer._parameters.get("weight"), Tensor):
        return "its weight is computed from other parameters: remove the parametrization first"
    if is_hooked(layer):
        return "it has forward hooks"
    return refuses_padding(layer)


def refuses_padding(layer: nn.Module) -> str:
    """Why the products do not know a layer's padding, in words; "" if they do."""
    if not isinstance(layer, nn.Conv2d):
        return ""
    if layer.padding_mode != "zeros":
        return f"padding_mode={layer.padding_mode!r}"
    reach = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    if layer.padding == "same" and any(r % 2 for r in reach):
        return "padding that is not symmetric"
    return ""


def refuse_packed_call(name: str, training: bool, tensors: Sequence[Tensor]) -> None:
    """Raise UsageError where a packed layer cannot compute: it is for inference on a CPU.

    Args:
        tensors: of the call, the layer's own among them.
    """
    required = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if training or required:
        why = "is in training mode" if training else "is asked for a gradient"
        raise UsageError(
            f"layer {name!r} is packed, for inference alone, and {why}: train the model that "
            "fst.pack was given, call eval() on the packed one, and run it within "
            "torch.inference_mode() or torch.no_grad()."
        )
    if not all(tensor.device.type == "cpu" for tensor in tensors):
        devices = " and ".join(sorted({str(tensor.device) for tensor in tensors}))
        raise UsageError(
            f"layer {name!r} is packed, for a CPU, and got tensors on {devices}: move the packed "
            "model and its input to the CPU, or use the model that fst.pack was given."
        )
