"""Finds the package of kernel sources and says what is missing to run it."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import torch

from fst.backends import cache
from fst.basics.machine import instructions, processor

PACKAGE = "fst.kernels"
LEAST_TRITON = (3, 6)
LEAST_CAPABILITY = (8, 0)
CPP_FILES = ("prune_cpu.cpp", "prune_cpu.h", "extension.py")


def load(module: str) -> ModuleType:
    """A module of the kernels, which are ``fst/kernels`` once installed and ``kernels`` in a
    checkout.
    """
    loaded = sys.modules.get(f"{PACKAGE}.{module}")
    if loaded is not None:  # torch.compile traces this line, but no import
        return loaded
    if PACKAGE not in sys.modules and importlib.util.find_spec(PACKAGE) is None:
        _load_checkout()
    return importlib.import_module(f"{PACKAGE}.{module}")


def folder() -> Path:
    """Where the sources of the kernels lie."""
    spec = importlib.util.find_spec(PACKAGE)
    return _checkout() if spec is None else Path(next(iter(spec.submodule_search_locations)))


def _checkout() -> Path:
    folder = Path(__file__).resolve().parents[2] / "kernels"
    if not (folder / "__init__.py").is_file():
        raise ModuleNotFoundError(f"the kernels are neither installed nor in {folder}.")
    return folder


def _load_checkout() -> None:
    folder = _checkout()
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = package
    spec.loader.exec_module(package)


@functools.cache
def triton_missing() -> str:
    """Why the Triton kernels cannot run here; "" if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < LEAST_TRITON:
        return f"triton {triton.__version__} is older than {'.'.join(map(str, LEAST_TRITON))}"
    return "" if triton.knobs.runtime.interpret else _device_missing()


@functools.cache
def cuda_missing() -> str:
    """Why the CUDA C++ kernels cannot be built and run here; "" if they can."""
    missing = _device_missing()
    if not missing and shutil.which("nvcc") is None:
        from torch.utils.cpp_extension import CUDA_HOME

        if CUDA_HOME is None:
            missing = "nvcc is not found (CUDA toolkit)"
    if not missing and shutil.which("c++") is None and shutil.which("g++") is None:
        missing = "no C++ compiler is found"
    if not missing and shutil.which("ninja") is None:
        missing = "ninja is not found"
    return missing


def cpp_library() -> Path:
    """Where the C++ kernels lie once built: a folder for these sources, this torch, this CPU."""
    found = hashlib.blake2b(digest_size=8)
    for text in (torch.__version__, processor(), instructions()):
        found.update(text.encode())
    for name in CPP_FILES:
        found.update((folder() / name).read_bytes())
    return cache.folder() / f"cpp_{found.hexdigest()}" / "fst_prune_cpu.so"


def _device_missing() -> str:
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        return f"the GPU has compute capability {'.'.join(map(str, capability))}, 8.0 is needed"
    return ""
