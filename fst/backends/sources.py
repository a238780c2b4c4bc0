"""Finds the package of kernel sources and says what is missing to run it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import zlib
from pathlib import Path
from types import ModuleType

import torch

PACKAGE = "fst.kernels"
INSTALLED = Path(__file__).resolve().parents[1] / "kernels"
LEAST_TRITON = (3, 6)
LEAST_CAPABILITY = (8, 0)
CPP_LEVELS = {"AVX512": "avx512", "AVX2": "avx2"}  # as torch names what the processor has


def load(module: str) -> ModuleType:
    """A module of the kernels, which are ``fst/kernels`` once installed and ``kernels`` in a
    checkout.
    """
    loaded = sys.modules.get(f"{PACKAGE}.{module}")
    if loaded is not None:  # torch.compile traces this line, but no import
        return loaded
    if PACKAGE not in sys.modules and not INSTALLED.is_dir():
        _load_checkout()
    return importlib.import_module(f"{PACKAGE}.{module}")


def folder() -> Path:
    """Return the folder with the sources of the kernels, those of this package."""
    if INSTALLED.is_dir():
        return INSTALLED
    folder = Path(__file__).resolve().parents[2] / "kernels"
    if not (folder / "__init__.py").is_file():
        raise ModuleNotFoundError(f"the kernels are neither installed nor in {folder}.")
    return folder


def _load_checkout() -> None:
    where = folder()
    spec = importlib.util.spec_from_file_location(
        PACKAGE, where / "__init__.py", submodule_search_locations=[str(where)]
    )
    assert spec is not None and spec.loader is not None  # folder() has found the file
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = package
    spec.loader.exec_module(package)


def triton_missing() -> str:
    """The reason why the Triton kernels cannot run here; "" if they can."""
    return _triton_missing()


# torch.compiler.assume_constant_result, which would import torch._dynamo and with it triton
triton_missing._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _triton_missing() -> str:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET", "0") == "0" and (reason := device_missing()):
        return reason  # before a process on a CPU imports triton for nothing
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < LEAST_TRITON:
        return f"triton {triton.__version__} is older than {'.'.join(map(str, LEAST_TRITON))}"
    return "" if triton.knobs.runtime.interpret else device_missing()


@functools.cache
def cpp_library() -> Path:
    """Return the path of the compiled C++ kernels, for the instruction set that torch uses."""
    level = CPP_LEVELS.get(torch.backends.cpu.get_cpu_capability(), "base")
    return folder() / f"cpu_{level}.so"


@functools.cache
def cpp_checksum() -> int:
    """Of the sources of the C++ kernels; setup.py compiles it into the libraries."""
    found = 0
    for file in sorted((*folder().glob("*.cpp"), *folder().glob("*.h"))):
        found = zlib.crc32(file.read_bytes(), found)
    return found


def device_missing() -> str:
    """Why no kernel for GPUs can run here; "" if one can."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        return f"the GPU has compute capability {'.'.join(map(str, capability))}, 8.0 is needed"
    return ""
