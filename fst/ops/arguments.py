"""Arguments of the op, checked and brought into one form."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fst.basics.autocast import autocast_dtype, is_autocast
from fst.basics.errors import UsageError
from fst.ops.geometry import Geometry

IntPair = int | Sequence[int]
UNTRACEABLE = (
    "torch.jit.trace, which TensorBoard's add_graph calls too, cannot follow converted layers: "
    "trace fst.fold(model)."
)


def compute_dtype(input: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """The dtype of the GEMMs: autocast's where it is on, else that of the tensors.

    Raises:
        TypeError: not floating point, or dtypes differ without autocast.
    """
    given = {"input": input, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, tensor in given.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{name} has dtype {tensor.dtype}; allowed are floating point types.")
    dtype = autocast_dtype(input.device) if is_autocast() else None
    if dtype is not None and torch.float64 not in (input.dtype, weight.dtype):
        return dtype
    for name, tensor in given.items():
        if tensor.dtype != weight.dtype:
            raise TypeError(
                f"{name} has dtype {tensor.dtype}, weight {weight.dtype}: they must be the same, "
                "or autocast must be on."
            )
    return input.dtype


def _pair(name: str, value: IntPair, least: int) -> tuple[int, int]:
    if type(value) is tuple and [type(v) for v in value] == [int, int] and min(value) >= least:
        return value
    values = tuple(value) if isinstance(value, list | tuple) else (value, value)
    if len(values) == 1:
        values = values * 2
    found = tuple(map(_integer, values))
    if len(found) != 2 or not all(v is not None and v >= least for v in found):
        raise ValueError(f"{name}={value!r} must be an integer >= {least}, or two of them.")
    return found[0], found[1]


def _integer(value: Any) -> Any:
    """``value`` as an integer of Python's, NumPy's too; None if it is none."""
    if isinstance(value, int | torch.SymInt):
        return None if isinstance(value, bool) else value
    is_integer = isinstance(value, SupportsIndex) and not isinstance(value, Tensor)
    return operator.index(value) if is_integer else None


def padded_geometry(
    input: Tensor,
    weight: Tensor,
    stride: IntPair,
    padding: IntPair | str,
    dilation: IntPair,
    groups: int,
) -> tuple[Tensor, Geometry]:
    """Symmetric padding as a `Geometry`; what is left of an asymmetric "same" is padded here."""
    strides, dilations = _pair("stride", stride, 1), _pair("dilation", dilation, 1)
    paddings = padding if isinstance(padding, str) else _pair("padding", padding, 0)
    shapes = input.shape, weight.shape
    geometry, edges = _geometry(*shapes, strides, paddings, dilations, groups)
    return F.pad(input, edges) if any(edges) else input, geometry


def _geometry(
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: tuple[int, int],
    padding: tuple[int, int] | str,
    dilation: tuple[int, int],
    groups: int,
) -> tuple[Geometry, tuple[int, int, int, int]]:
    """The geometry, and what is to be padded before it, as `F.pad` takes it."""
    reach = [d * (k - 1) for d, k in zip(dilation, weight_shape[2:], strict=True)]
    edges = (0, 0, 0, 0)
    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise ValueError(
                f"padding={padding!r} is unknown; allowed: integers >= 0, 'same', 'valid'."
            )
        if padding == "same" and stride != (1, 1):
            raise ValueError(f"padding='same' needs stride=1, not stride={stride!r}.")
        total = reach if padding == "same" else [0, 0]
        padding, edges = (total[0] // 2, total[1] // 2), (0, total[1] % 2, 0, total[0] % 2)
    for axis, name in enumerate(("height", "width")):
        padded = input_shape[2 + axis] + 2 * padding[axis] + edges[3 - 2 * axis]
        if padded <= reach[axis]:
            raise ValueError(
                f"input has shape {tuple(input_shape)}: its {name} with padding={padding[axis]} "
                f"is smaller than the kernel's reach of {reach[axis] + 1} "
                f"(weight {tuple(weight_shape)}, dilation={dilation[axis]})."
            )
    return Geometry(stride, padding, dilation, groups), edges


def check_tensors(input: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> int:
    """``groups``. Raises unless shapes, groups, layouts and devices fit, and inside transforms of
    torch.func.
    """
    _check_are_tensors(input, weight, bias)
    _check_no_transform()
    if input.dim() != 4:
        raise ValueError(f"input has shape {tuple(input.shape)}; it must be (N, Cin, H, W).")
    if weight.dim() != 4:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; it must be (Cout, Cin/groups, kh, kw)."
        )
    given, groups = groups, _integer(groups)
    if groups is None or groups < 1:
        raise ValueError(f"groups={given!r} must be an integer >= 1.")
    outputs, channels = weight.shape[:2]
    if outputs % groups:
        raise ValueError(
            f"groups={groups} must divide the output channels of weight {tuple(weight.shape)}."
        )
    if input.shape[1] != channels * groups:
        raise ValueError(
            f"input {tuple(input.shape)} has {input.shape[1]} channels; weight "
            f"{tuple(weight.shape)} with groups={groups} needs {channels * groups}."
        )
    if 0 in weight.shape or 0 in input.shape[1:]:
        raise ValueError(
            f"input {tuple(input.shape)}, weight {tuple(weight.shape)}: only the batch may be 0."
        )
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; it must be ({outputs},).")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != input.device:
            raise ValueError(
                f"{name} is on {tensor.device}, input on {input.device}: they must be the same."
            )
    return groups


def _check_are_tensors(input: object, weight: object, bias: object) -> None:
    for name, value in (("input", input), ("weight", weight), ("bias", bias)):
        if isinstance(value, fx.Proxy):
            raise TypeError(
                f"{name}={value!r}: torch.fx cannot trace converted layers. Trace first (so does "
                "torchvision's create_feature_extractor), and convert what comes of it; or fold."
            )
        if not isinstance(value, Tensor) and not (name == "bias" and value is None):
            raise TypeError(f"{name}={value!r} must be a torch.Tensor.")
        if value is not None and value.layout != torch.strided:
            raise TypeError(
                f"{name} has layout {value.layout}; allowed is torch.strided: "
                "pass a dense tensor, such as to_dense() returns. Pruning is the strategy's part."
            )


def _check_no_transform() -> None:
    if torch.compiler.is_compiling():
        return
    if torch.is_grad_enabled() and torch.jit.is_tracing():
        raise UsageError(UNTRACEABLE)
    if not torch._C._are_functorch_transforms_active():
        return
    raise UsageError(
        "sparse_conv2d cannot run inside the transforms of torch.func (grad, vmap, jacrev, jvp): "
        "call torch.autograd.grad instead, also on the output of torch.func.functional_call; "
        "for inference transform fst.fold(model)."
    )


def check_linear(input: Tensor, weight: Tensor) -> None:
    """Raise ValueError unless the shapes of a linear layer fit."""
    _check_are_tensors(input, weight, None)
    if weight.dim() != 2:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; it must be (out_features, in_features)."
        )
    if input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"input has shape {tuple(input.shape)}; its last axis must be "
            f"in_features={weight.shape[1]}."
        )
