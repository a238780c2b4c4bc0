"""CUDA C++ sources, compiled by torch on first use."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from torch.utils import cpp_extension

from fst.backends import sources

FOLDER = Path(__file__).resolve().parent
ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"  # of those to compile for; unset: the GPUs that are here
# torch forbids CUDA's conversions and operators of 16-bit numbers
ALLOWED = [
    f"-U__CUDA_NO_{what}__"
    for what in ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
]


def missing() -> str:
    """Why CUDA C++ sources cannot be built and run here; "" if they can."""
    reason = sources.device_missing()
    if not reason and shutil.which("nvcc") is None and cpp_extension.CUDA_HOME is None:
        reason = "nvcc is not found (CUDA toolkit)"
    if not reason and shutil.which("c++") is None and shutil.which("g++") is None:
        reason = "no C++ compiler is found"
    if not reason and shutil.which("ninja") is None:
        reason = "ninja is not found"
    return reason


def build(name: str, files: Sequence[str]) -> ModuleType:
    """Compile ``files``, relative to this folder, unless torch's extension cache has them; load.

    Raises:
        RuntimeError: no compiler, or the compilation failed; the message says what is needed.
    """
    toolkit = _toolkit()
    try:
        return cpp_extension.load(
            name=name,
            sources=[str(FOLDER / file) for file in files],
            extra_include_paths=[str(toolkit / "include")],
            extra_cuda_cflags=["-O3", *ALLOWED],
            extra_ldflags=[f"-L{toolkit / 'lib64'}"],
        )
    except (OSError, RuntimeError, ImportError) as error:
        wanted = os.environ.get(ARCHITECTURES, "the GPUs that are here")
        raise RuntimeError(
            f"{name} could not be built for {wanted}: that needs nvcc of the CUDA version torch "
            f"was built with, a C++ compiler and ninja.\n{_essence(str(error))}"
        ) from error


def _essence(said: str, lines: int = 8) -> str:
    """The first errors that a compiler reported, or the last lines."""
    errors = [line for line in said.splitlines() if "error" in line.lower()]
    return "\n".join(errors[:lines] or said.splitlines()[-lines:])


def _toolkit() -> Path:
    """The CUDA toolkit; nvcc itself knows best, for it may be a script or a link."""
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        said = subprocess.run([nvcc, "--dryrun", "-c", "none.cu"], capture_output=True, text=True)
        found = re.search(r"^#\$ _HERE_=(.+)$", said.stderr, re.MULTILINE)
        if found:
            return Path(found[1]).parent
    return Path(cpp_extension.CUDA_HOME or "")
