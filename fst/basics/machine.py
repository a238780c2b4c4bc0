"""The machine in words."""

from __future__ import annotations

import ctypes
import functools
import platform
import re
from pathlib import Path


@functools.cache
def processor() -> str:
    """The processor's name, such as "AMD EPYC"."""
    return _of_first_core("model name") or platform.processor() or platform.machine()


@functools.cache
def instructions() -> str:
    """The processor's sets of instructions, as far as the system names them."""
    return _of_first_core("flags|Features") or platform.machine()


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory, as jemalloc and CUDA's caching allocator do.

    Else every large tensor is paged in anew, which costs up to a third of a small layer's time and
    varies with what ran before. The process holds more memory, for the gaps between what it uses.
    Returns whether it was done.
    """
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    settings = ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 2**26))
    return all([mallopt(option, value) == 1 for option, value in settings])


def _of_first_core(field: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(rf"^(?:{field})\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else ""
