"""What a measurement was made with: versions, and a description of the machine in words."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import torch

import fst
from fst.basics.machine import processor

PACKAGES = ("torchvision", "onedl-mmengine", "timm", "onedl-mmdetection")


def versions() -> dict[str, str]:
    """Versions of this library, Python, PyTorch and the packages that training uses."""
    found = {"fst": fst.__version__, "python": platform.python_version()}
    found["torch"] = torch.__version__
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine() -> str:
    """Processor, cores and GPUs."""
    parts = [f"{processor()}, {cores()} cores"]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        parts += [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)]
    else:
        parts.append("no GPU")
    return ", ".join(parts)
