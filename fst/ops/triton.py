"""The kernels as torch operators (``torch.ops.fst``), which torch.compile traces without breaks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, infer_schema, register_fake

from fst.backends import sources
from fst.basics.errors import UsageError
from fst.ops.cpp.pruning import like_weight

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_M = 8  # sorting larger groups takes most of the registers and seconds to compile

_OPERATORS = Library("fst", "FRAGMENT")


def _operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function as ``torch.ops.fst.NAME``.

    PyTorch's own decorator `custom_op` makes four further Python calls per call, for operators that
    autograd differentiates.
    """
    name = function.__name__
    _OPERATORS.define(name + infer_schema(function, mutates_args=()))
    traced = torch._disable_dynamo(function)  # compiled code calls it as it is
    _OPERATORS.impl(name, traced, "CompositeExplicitAutograd")
    return getattr(torch.ops.fst, name).default


def takes(*dtypes: torch.dtype) -> bool:
    """Whether the kernels compute in these dtypes."""
    return all(dtype in DTYPES for dtype in dtypes)


def takes_weight(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels can prune a weight (Cout, Cin/groups, kh, kw) into ``dtype``."""
    last = weight.is_contiguous(memory_format=torch.channels_last)
    return takes(weight.dtype, dtype) and (weight.is_contiguous() or last)


def takes_grad_output(m: int, rule: str, rescale: str, dtype: torch.dtype) -> bool:
    """Whether the kernels can prune grad_output by a rule `fst.NM` with these fields."""
    by_channel = rule == "magnitude_rescaled" and rescale == "channel"
    return takes(dtype) and m <= MOST_M and not by_channel


def _kernels(module: str) -> ModuleType:
    reason = sources.triton_missing()
    if reason:
        raise UsageError(f"the Triton kernels cannot run here: {reason}.")
    return sources.load(module)


def _check_dtypes(names: str, *tensors: Tensor) -> None:
    found = {tensor.dtype for tensor in tensors}
    if len(found) > 1 or not takes(*found):
        raise TypeError(f"{names} must have one dtype of {DTYPES}, got {found}.")


def _on(tensor: Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


@_operator
def prune_grad_output(
    grad_output: Tensor, n: int, m: int, rule: str, rescale: str, groups: int, seed: Tensor | None
) -> Tensor:
    """grad_output (N, C, P, Q) pruned along C, as `fst.ops.prune.prune_grad_output` does it.

    ``seed``: one int64 on the same device, for rule="random" only.

    Raises:
        ValueError: a rule or dtype that `takes_grad_output` refuses.
    """
    if not takes_grad_output(m, rule, rescale, grad_output.dtype):
        raise ValueError(
            f"the Triton kernels cannot prune grad_output of {grad_output.dtype} by m={m}, "
            f"rule={rule!r}, rescale={rescale!r}."
        )
    with _on(grad_output):
        return _kernels("prune_gradient").prune(grad_output, n, m, rule, rescale, groups, seed)


@register_fake("fst::prune_grad_output")
def _(grad_output: Tensor, *_: object) -> Tensor:
    return torch.empty_like(grad_output)


@_operator
def prune_weight(
    weight: Tensor,
    groups: int,
    n_output: int,
    m_output: int,
    n_grad_input: int,
    m_grad_input: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    """S(W), S(Wᵀ) and the bool mask of S(W), of a weight (Cout, Cin/groups, kh, kw).

    A pattern with n = 0 is left out, and its tensors with it. Results have the weight's strides.

    Raises:
        ValueError: a weight that `takes_weight` refuses, or groups of more than `MOST_M`.
    """
    if max(m_output, m_grad_input) > MOST_M:
        raise ValueError(
            f"m_output={m_output} and m_grad_input={m_grad_input} must be at most {MOST_M}."
        )
    if not takes_weight(weight, dtype):
        raise ValueError(
            f"the Triton kernels cannot prune weight: dtype {weight.dtype}, shape "
            f"{tuple(weight.shape)}, strides {weight.stride()}, into {dtype}."
        )
    results = like_weight(weight, groups, n_output, m_output, n_grad_input, m_grad_input, dtype)
    made = iter(results)
    pruned = next(made) if n_output else None
    transposed = next(made) if n_grad_input else None
    kernels = _kernels("prune_weight")
    job = kernels.Job(weight, groups, pruned, transposed, next(made, None))
    output = (n_output, m_output) if n_output else None
    grad_input = (n_grad_input, m_grad_input) if n_grad_input else None
    with _on(weight):
        kernels.prune([job], output, grad_input)
    return results


register_fake("fst::prune_weight", like_weight)


def takes_block(block: tuple[int, int] | None) -> bool:
    """Whether the kernels sum grad_output over such blocks; (1, 1) is no sum."""
    return block in ((1, 1), (1, 2), (2, 2))


@_operator
def fold_grad_output(
    grad_output: Tensor, block: Sequence[int], lattices: Sequence[int]
) -> list[Tensor]:
    """`fst.ops.positions.fold_grad_output` with restoration; lattices are flattened fours."""
    _check_dtypes("grad_output", grad_output)
    results = _folded(grad_output, lattices)
    with _on(grad_output):
        _kernels("fold").fold(grad_output, results, tuple(block), _fours(lattices))
    return results


@register_fake("fst::fold_grad_output")
def _(grad_output: Tensor, block: Sequence[int], lattices: Sequence[int]) -> list[Tensor]:
    return _folded(grad_output, lattices)


def _fours(lattices: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(lattices[i : i + 4]) for i in range(0, len(lattices), 4)]


def _folded(grad_output: Tensor, lattices: Sequence[int]) -> list[Tensor]:
    """Uninitialised (N, C, rows, columns) of each lattice, in the memory format of grad_output."""
    samples, channels, height, width = grad_output.shape
    last = grad_output.is_contiguous(memory_format=torch.channels_last)
    inner = last and not grad_output.is_contiguous()
    return [
        torch.empty(
            samples,
            channels,
            (height - row + row_step - 1) // row_step,
            (width - column + column_step - 1) // column_step,
            dtype=grad_output.dtype,
            device=grad_output.device,
            memory_format=torch.channels_last if inner else torch.contiguous_format,
        )
        for row, row_step, column, column_step in _fours(lattices)
    ]


@_operator
def grad_weight(
    grad_output: Tensor,
    inputs: Sequence[Tensor],
    weight: Tensor,
    block: Sequence[int],
    restore: bool,
    lattices: Sequence[int],
    windows: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """`fst.ops.positions.grad_weight` with one input for each lattice; lattices and the windows
    of their kept positions are flattened fours.

    A lattice (0, 1, 0, 1) with restore=False is the weight gradient of a dense convolution.
    """
    _check_dtypes("grad_output and inputs", grad_output, *inputs)
    result = torch.empty_like(weight, dtype=grad_output.dtype)
    kernels = _kernels("grad_weight")
    problem = kernels.Problem(
        tuple(block), restore, _fours(lattices), _fours(windows), tuple(dilation), groups
    )
    with _on(grad_output):
        kernels.grad_weight(grad_output, inputs, result, problem)
    return result


@register_fake("fst::grad_weight")
def _(grad_output: Tensor, inputs: Sequence[Tensor], weight: Tensor, *_: object) -> Tensor:
    return torch.empty_like(weight, dtype=grad_output.dtype)
