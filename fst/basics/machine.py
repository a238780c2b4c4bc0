"""The machine in words."""

from __future__ import annotations

import functools
import os
import platform
import re
from pathlib import Path

BUSY = 1.5  # threads that want to run, for each processor


@functools.cache
def processor() -> str:
    """The processor's name, such as "AMD EPYC"."""
    return _of_first_core("model name") or platform.processor() or platform.machine()


@functools.cache
def instructions() -> str:
    """The processor's sets of instructions, as far as the system names them."""
    return _of_first_core("flags|Features") or platform.machine()


def is_overloaded() -> bool:
    """True where others keep the processors busy too, so that times say little."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # not of this system, or not to be had
        return False
    return load > BUSY * (os.cpu_count() or 1)


def _of_first_core(field: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(rf"^(?:{field})\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else ""
