"""Compile a Triton launch for a GPU that need not be here, and read what came out."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

from .launch import Launch

_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
_MEMORY = re.compile(r"\b((?:ld|st)\.(?:global|shared|local)[.\w]*|bar\.sync)")


class Compiled(NamedTuple):
    """The resources of a kernel on a multiprocessor, and its memory instructions.

    Attributes:
        registers: per thread. stack: bytes per thread in local memory (spills). shared: bytes.
        memory: instruction that moves data -> how often it occurs.
    """

    registers: int
    stack: int
    shared: int
    memory: dict[str, int]


def compile_for(launch: Launch, capability: int) -> Compiled:
    """Compile as Triton would at this launch: 80 for sm_80, 90 for sm_90a.

    Tensors of the launch may be on the meta device; addresses count as aligned to 16 bytes.
    """
    kernel = launch.kernel
    options = {k: v for k, v in launch.constants.items() if k not in kernel.arg_names}
    values = dict(zip(_dynamic(launch), launch.arguments, strict=True))
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[Any]] = {}
    for index, name in enumerate(kernel.arg_names):
        value = values.get(name)
        if name in launch.constants or (isinstance(value, int) and value == 1):
            signature[name] = "constexpr"
            constants[index,] = launch.constants.get(name, 1)
            continue
        signature[name] = _type_of(value)
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    memory = dict(Counter(_MEMORY.findall(binary.asm["ptx"])))
    registers, stack = _resources(binary.asm["cubin"])
    return Compiled(registers, stack, binary.metadata.shared, memory)


def _dynamic(launch: Launch) -> list[str]:
    return [name for name in launch.kernel.arg_names if name not in launch.constants]


def _type_of(value: object) -> str:
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 2**31 else "i64"


def _resources(cubin: bytes) -> tuple[int, int]:
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    registers, stack = map(int, found.groups())
    return registers, stack
