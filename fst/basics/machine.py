"""The machine in words."""

from __future__ import annotations

import functools
import platform
import re
from pathlib import Path


@functools.cache
def processor() -> str:
    """The processor's name, such as "AMD EPYC"."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()
