"""The C++ kernels for CPUs, where they have been built: they are never needed."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.library import register_fake

from fst.backends import sources

BACKEND = "cpp"
BUILD = "python -m fst.ops build --cpu"
MOST_M = 8
RESULTS = {  # dtype of a weight -> dtypes into which it can be pruned
    torch.float32: (torch.float32, torch.bfloat16, torch.float16),
    torch.bfloat16: (torch.bfloat16,),
    torch.float16: (torch.float16,),
}


def missing() -> str:
    """Why the kernels cannot run here; "" if they can. What it says once holds in this process."""
    return _load()


# torch.compiler.assume_constant_result, which would import torch._dynamo and with it triton
missing._dynamo_marked_constant = True


@functools.cache
def _load() -> str:
    library = sources.cpp_library()
    if not library.is_file():
        return f"not built for this CPU and torch ({BUILD})"
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return f"{library} cannot be loaded ({error}): {BUILD} mends it"
    _declare()
    return ""


@functools.cache
def _declare() -> None:
    register_fake("fst::prune_grad_output_cpp", _like_grad_output)
    register_fake("fst::prune_weight_cpp", _like_weight)


def _is_plain(tensor: Tensor) -> bool:
    """Whether it lies on a CPU, and is no subclass (DTensor) that the operators do not know."""
    return type(tensor) is Tensor and tensor.device.type == "cpu"


def takes_weight(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels can prune a weight (Cout, Cin/groups, kh, kw) into ``dtype``."""
    if not _is_plain(weight) or dtype not in RESULTS.get(weight.dtype, ()) or missing():
        return False
    last = weight.is_contiguous(memory_format=torch.channels_last)
    return weight.is_contiguous() or last


def takes_grad_output(grad_output: Tensor, m: int, rule: str, rescale: str) -> bool:
    """Whether the kernels can prune grad_output by a rule `fst.NM` with these fields."""
    if not _is_plain(grad_output) or grad_output.dtype not in RESULTS or m > MOST_M:
        return False
    if (rule == "magnitude_rescaled" and rescale == "channel") or missing():
        return False
    last = grad_output.is_contiguous(memory_format=torch.channels_last)
    return grad_output.is_contiguous() or last


def prune_weight(
    weight: Tensor,
    groups: int,
    n_output: int,
    m_output: int,
    n_grad_input: int,
    m_grad_input: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    """S(W), S(Wᵀ) and the mask of S(W), as `fst.ops.triton.prune_weights` gives them."""
    return torch.ops.fst.prune_weight_cpp(
        weight, groups, n_output, m_output, n_grad_input, m_grad_input, dtype
    )


def _like_weight(
    weight: Tensor,
    groups: int,
    n_output: int,
    m_output: int,
    n_grad_input: int,
    m_grad_input: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    pruned = [dtype] * (bool(n_output) + bool(n_grad_input))
    kinds = pruned + [torch.bool] * bool(n_output)
    return [torch.empty_like(weight, dtype=kind) for kind in kinds]


def prune_grad_output(
    grad_output: Tensor, n: int, m: int, rule: str, rescale: str, groups: int, seed: Tensor | None
) -> Tensor:
    """grad_output (N, C, P, Q) pruned along C, as `fst.ops.triton.prune_grad_output` does it."""
    return torch.ops.fst.prune_grad_output_cpp(grad_output, n, m, rule, rescale, groups, seed)


def _like_grad_output(
    grad_output: Tensor, n: int, m: int, rule: str, rescale: str, groups: int, seed: Tensor | None
) -> Tensor:
    return torch.empty_like(grad_output)
