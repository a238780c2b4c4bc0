"""The C++ kernels for CPUs, where the installation has compiled them: they are never needed.

They are functions of pointers and sizes in a library without torch (`kernels/cpu.h`), called
through ctypes and registered as operators of torch, so that torch.compile takes them. They run in
as many threads as torch does, in threads of torch's OpenMP runtime. Each file that calls kernels
says why they cannot take some operands.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fst.backends import sources
from fst.basics.errors import UsageError
from fst.ops.geometry import (
    Geometry,
    empty_maps,
    geometry_of,
    is_channels_last,
    output_shape,
)
from fst.ops.operators import Planned

BACKEND = "cpp"
MOST_POSITIONS = 2**31 - 1  # an index has 32 bits
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as kernels/cpu.h numbers them
LAST = torch.channels_last
TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64}  # as kernels/cpu.h names them
FAILURES = {  # as kernels/cpu.h numbers them
    1: (MemoryError, "no memory for what it packs"),
    2: (ValueError, "index must be ascending positions of the output map"),
    3: (ValueError, "its numbers describe no operands that it could read."),
    4: (FloatingPointError, "a weight is infinite or NaN"),
}
_used_threads = 0  # the process whose threads have run a kernel; a forked one inherits the number


def missing() -> str:
    """Why the kernels cannot run here; "" if they can. What it says once holds in this process."""
    return _load()[0]


# torch.compiler.assume_constant_result, which would import torch._dynamo and with it triton
missing._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _load() -> tuple[str, Any]:
    """The reason why there is no library, and None; or "" and the library."""
    file = sources.cpp_library()
    if not file.is_file():
        again = "install FST again (in a clone: pip install -e .)"
        return f"not compiled: install GCC or Clang, then {again}", None
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        return f"{file} cannot be loaded ({error})", None
    library.fst_sources.restype = ctypes.c_uint32
    if library.fst_sources() != sources.cpp_checksum():
        return f"{file} was compiled from other sources: install FST again", None
    return "", library


def operator(
    like: Callable[..., Any], tensors: int, returns: str = "Tensor"
) -> Callable[[Callable[..., Callable[..., Any]]], Planned]:
    """Register a kernel as ``torch.ops.fst.NAME_cpp``: see `Planned`."""
    return lambda plan: Planned(plan, like, tensors, returns)


def _refuse_fork(threads: int) -> None:
    """Note the process whose threads run a kernel.

    Raises:
        UsageError: they are those of a process that this one was forked from. OpenMP would wait for
            them for ever, in torch's own operators too.
    """
    global _used_threads
    if _used_threads not in (0, os.getpid()):
        raise UsageError(
            f"this process was forked from one that has computed in threads, so {threads} "
            "threads would wait for ever: call torch.set_num_threads(1) first, or start "
            "processes by 'spawn'."
        )
    _used_threads = os.getpid()


@functools.cache
def kernel(name: str) -> Callable[..., None]:
    """A function of the library: it computes in torch's number of threads.

    Raises:
        UsageError: the kernels are missing; when called, see `_refuse_fork`.
        ctypes.ArgumentError, TypeError: other arguments than it declares, or fewer.
        MemoryError: it found no memory.
        ValueError: the list of positions is not ascending, or leaves the output map; or a number is
            none that it can index with.
        FloatingPointError: it takes finite weights alone.
    """
    reason, library = _load()
    if reason:
        raise UsageError(f"the C++ kernels cannot run here: {reason}.")
    declared, function = library[f"{name}_arguments"], library[name]
    declared.restype = ctypes.c_char_p
    function.argtypes = [TYPES[letter] for letter in declared().decode()]
    process, threads_of = os.getpid, torch.get_num_threads

    def run(*given: int | None | ctypes.Array) -> None:
        threads = threads_of()
        if threads > 1 and _used_threads != process():
            _refuse_fork(threads)
        status = function(*given, threads)
        if status:
            kind, what = FAILURES[status]
            raise kind(f"{name}: {what}")

    return run


def integers(*values: int) -> ctypes.Array:
    """An array of int64, as the kernels take shapes."""
    return (ctypes.c_int64 * len(values))(*values)


def is_dense(tensor: Tensor) -> bool:
    """True for a tensor that is contiguous, or contiguous in channels_last."""
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=LAST)


def refuses(*operands: Tensor) -> str:
    """The reason why kernels cannot read these (N, C, H, W) where they lie; "" if they can.

    They must be of one dtype, on a CPU, and no subclass (DTensor) that the operators do not know.
    """
    if reason := missing():
        return reason
    dtype = operands[0].dtype
    for x in operands:
        if type(x) is not Tensor or x.device.type != "cpu":
            return "an operand is no plain tensor on a CPU"
        if x.dtype != dtype or dtype not in KINDS:
            return f"operands of {dtype} and {x.dtype} are none that it reads"
        if x.dim() != 4 or not is_dense(x):
            return "an operand is neither contiguous nor channels_last with four axes"
    return ""


def check_operands(**operands: Tensor) -> None:
    """Raise TypeError or ValueError unless the kernels can read these where they lie."""
    dtypes = {x.dtype for x in operands.values()}
    if len(dtypes) > 1 or not dtypes <= KINDS.keys():
        found = ", ".join(f"{name} has dtype {x.dtype}" for name, x in operands.items())
        raise TypeError(f"{found}: all must have one of {', '.join(map(str, KINDS))}.")
    for name, x in operands.items():
        if x.dim() != 4 or not is_dense(x):
            raise ValueError(
                f"{name} {tuple(x.shape)} with strides {x.stride()} must have four axes and be "
                "contiguous or channels_last."
            )


def check_plain(dtype: torch.dtype, shape: tuple[int, ...], **given: Tensor | None) -> None:
    """Raise ValueError unless the kernels can read the tensors where they lie."""
    for name, x in given.items():
        if x is not None and (x.dtype != dtype or x.shape != shape or not x.is_contiguous()):
            found = f"{name} {x.dtype} {tuple(x.shape)} with strides {x.stride()}"
            raise ValueError(f"{found} must be {dtype} {shape}, contiguous.")


def check_map(
    grad_output: Tensor, input_size: Sequence[int], weight_shape: Sequence[int], geometry: Geometry
) -> None:
    """Raise ValueError unless grad_output has the shape of the convolution's output."""
    wanted = output_shape(input_size, weight_shape, geometry)
    if grad_output.shape != wanted:
        raise ValueError(f"grad_output {tuple(grad_output.shape)} must have the shape {wanted}.")


def check_list(index: Tensor, weight: Tensor | None, positions: int) -> None:
    """Raise ValueError unless the tensors can be a list of so many positions, and their weights."""
    check_plain(torch.int32, (index.numel(),), index=index)
    check_plain(torch.float32, (index.numel(),), weight=weight)
    if len(index) and not positions:
        raise ValueError(f"index names {len(index)} positions of an empty batch.")


def convolution(
    input_size: Sequence[int], weight_shape: Sequence[int], geometry: Geometry
) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """The numbers of a convolution as kernels/conv_shape.h orders them; a group's channels, groups.

    Raises:
        ValueError: there is no such convolution, or 32 bits cannot count its positions.
    """
    for name, sizes in (("input_size", input_size), ("weight_shape", weight_shape)):
        if len(sizes) != 4 or min(sizes) < 0:
            raise ValueError(f"{name}={tuple(sizes)} must be four sizes.")
    out, inside, *kernel = weight_shape
    stride, padding, dilation, groups = geometry
    least = {"kernel": (kernel, 1), "stride": (stride, 1), "dilation": (dilation, 1)}
    for name, (pair, low) in {**least, "padding": (padding, 0)}.items():
        if not all(low <= number <= MOST_POSITIONS for number in pair):
            raise ValueError(
                f"{name}={tuple(pair)} must be two numbers from {low} to {MOST_POSITIONS}."
            )
    check_groups(groups, out)
    samples, channels, *size = input_size
    if channels != inside * groups:
        raise ValueError(
            f"weight {tuple(weight_shape)} with groups={groups} takes {inside * groups} channels, "
            f"not those of an input {tuple(input_size)}."
        )
    rows, columns = output_shape(input_size, weight_shape, geometry)[2:]
    if rows < 1 or columns < 1:
        raise ValueError(
            f"kernel={tuple(kernel)} with dilation={dilation} is larger than an input of "
            f"{tuple(size)} with padding={padding}."
        )
    if samples * rows * columns > MOST_POSITIONS:
        raise ValueError(
            f"{samples} images of {rows}x{columns} output positions are more than can be named: "
            f"{MOST_POSITIONS}."
        )
    numbers = (samples, *size, rows, columns, *kernel, *stride, *padding, *dilation)
    return numbers, (inside, out // groups, groups)


def check_groups(groups: int, channels: int) -> None:
    """Raise ValueError unless ``groups`` divides the channels."""
    if groups < 1 or channels % groups:
        raise ValueError(f"groups={groups} must divide {channels} channels.")


def like_output(
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """An empty Y of a convolution, in the dtype and memory format of the input."""
    geometry = geometry_of(stride, padding, dilation, groups)
    shape = output_shape(input.shape, weight.shape, geometry)
    return empty_maps(shape, input, is_channels_last(input))


def like_grad_input(grad_output: Tensor, input_size: Sequence[int]) -> Tensor:
    """An empty dX, in the dtype and memory format of grad_output."""
    return empty_maps(input_size, grad_output, is_channels_last(grad_output))


def like_grad_weight(
    grad_output: Tensor, weight_shape: Sequence[int], channels_last: bool
) -> Tensor:
    """An empty dW in the dtype of grad_output."""
    return empty_maps(weight_shape, grad_output, channels_last)


def pointer(tensor: Tensor | None) -> int | None:
    """Address of the tensor's data; None without a tensor."""
    return None if tensor is None else tensor.data_ptr()
