"""The CUDA kernels of `kernels/sparse24`, compiled for the CPU and run thread by thread."""

from __future__ import annotations

import ctypes
import functools
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path(__file__).resolve().parent / "emulator"
KERNELS = Path(__file__).resolve().parents[2] / "kernels" / "sparse24"


def missing() -> str:
    """Why the kernels cannot be emulated here; "" if they can."""
    if sys.platform != "linux":
        return "the emulation of CUDA kernels is for Linux"
    return "" if shutil.which("g++") else "g++ is not installed"


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled emulation."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "emulated.so")
        paths = (f"-I{FOLDER}", f"-I{KERNELS}", str(FOLDER / "emulated.cpp"))
        options = ("-O2", "-std=c++20", "-shared", "-fPIC", "-Wno-unknown-pragmas")
        done = subprocess.run(
            ["g++", *options, *paths, "-o", str(made)], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        loaded = ctypes.CDLL(str(made))
    loaded.failure.restype = ctypes.c_char_p
    return loaded


class Extension:
    """Has the functions of `kernels/sparse24/binding.cpp`, for tensors on the CPU.

    Every launch runs its threads in another order.
    """

    launches = 0

    @classmethod
    def _seed(cls) -> ctypes.c_void_p:
        cls.launches += 1
        return ctypes.c_void_p(cls.launches)

    @classmethod
    def convolve(
        cls,
        y: Tensor,
        x: Tensor,
        values: Tensor,
        metadata: Tensor,
        bias: Tensor | None,
        numbers: tuple[int, ...],
    ) -> None:
        """Overwrite y."""
        assert 4 * len(numbers) == library().sizes(0)
        assert x.dtype == y.dtype == values.dtype and metadata.dtype == torch.int32
        for images in (x, y):
            assert images.is_contiguous(memory_format=torch.channels_last)
        y.fill_(torch.nan)
        code = library().emulate_convolve(
            int(x.dtype == torch.bfloat16),
            (ctypes.c_int * len(numbers))(*numbers),
            (ctypes.c_int64 * 3)(*(tensor.nbytes for tensor in (x, values, metadata))),
            *(_address(tensor) for tensor in (x, values, metadata, bias, y)),
            cls._seed(),
        )
        _check(code)

    @classmethod
    def pack(
        cls,
        weights: list[Tensor],
        groups: list[int],
        values: list[Tensor],
        metadata: list[Tensor],
        values_transposed: list[Tensor],
        metadata_transposed: list[Tensor],
    ) -> None:
        """Overwrite the results."""
        kinds = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
        rows = []
        results = (values, values_transposed, metadata, metadata_transposed)
        for weight, group, *made in zip(weights, groups, *results, strict=True):
            strides = (*weight.stride()[:2], weight.stride(3 if weight.shape[3] > 1 else 2))
            sizes = (group, weight.shape[0] // group, weight.shape[1], weight[0, 0].numel())
            addresses = (tensor.data_ptr() for tensor in (weight, *made))
            rows.append(struct.pack("8q6i", *addresses, *strides, *sizes, kinds[weight.dtype], 0))
        most = library().sizes(2)
        assert len(rows[0]) == library().sizes(1)
        bfloat = int(values[0].dtype == torch.bfloat16)
        for first in range(0, len(rows), most):
            part = rows[first : first + most]
            _check(library().emulate_pack(bfloat, b"".join(part), len(part), cls._seed()))


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"the emulation failed ({code}): {library().failure().decode()}")


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
