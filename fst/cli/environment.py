"""The environment of a result: versions, the machine, and what else a time depends on."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from fst.backends import choice, describe, store
from fst.backends.sources import cpp_library
from fst.basics.extras import EXTRA_OF, how_to_get
from fst.basics.machine import processor
from fst.basics.text import table
from fst.basics.version import __version__
from fst.ops import cpp

PACKAGES = "triton torchvision timm mmengine mmcv mmdet".split()  # of a training
ROOT = Path(__file__).resolve().parents[2]  # of the checkout, if this runs from one


def versions() -> dict[str, str]:
    """Versions of this library, its commit, Python, PyTorch and the packages of a training."""
    found = {"fst": __version__, "python": platform.python_version(), "torch": torch.__version__}
    installed = importlib.metadata.packages_distributions()
    names = (installed[package][0] for package in PACKAGES if package in installed)
    found |= {name: importlib.metadata.version(name) for name in names}
    if revision := commit():
        found["commit"] = revision
    return found


def of_extras() -> dict[str, str]:
    """Each package of this library's extras: its version, or how to get what is missing."""
    installed = importlib.metadata.packages_distributions()
    found = {}
    for package in EXTRA_OF:
        if package in installed:
            name = installed[package][0]
            found[name] = importlib.metadata.version(name)
        else:
            found[package] = f"missing: {how_to_get(package)}"
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


def surroundings(device: torch.device) -> dict[str, Any]:
    """All that a time depends on besides the program and its options: name -> value."""
    found: dict[str, Any] = {"device": f"CPU, {processor()}"}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["CUDA"] = torch.version.cuda
        found["cuDNN"] = torch.backends.cudnn.version()
    else:
        found["instruction set"] = torch.backends.cpu.get_cpu_capability()
    found["C++ kernels"] = cpp.missing() or "built"
    found |= {"threads": torch.get_num_threads(), **versions()}
    found["autotuner"] = "off" if choice.is_off() else "on"
    if forced := os.environ.get("FST_BACKENDS"):
        found["FST_BACKENDS"] = forced
    return found


def commit() -> str:
    """The checkout's commit, and whether files were changed since; "" where there is none."""
    if not (ROOT / ".git").exists():
        return ""
    found = _output(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"])
    tracked = ["--porcelain", "--untracked-files=no"]
    changed = found and _output(["git", "-C", str(ROOT), "status", *tracked])
    return f"{found} with changes" if changed else found


def code() -> str:
    """This library's version, and its commit in a checkout."""
    revision = commit()
    return f"fst {__version__}" + (f", commit {revision}" if revision else "")


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def main(_: argparse.Namespace) -> int:
    """The command `fst env`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {"system": platform.platform(), **surroundings(device), "machine": machine()}
    found |= {name: state for name, state in of_extras().items() if name not in found}
    found["C++ kernels"] = cpp.missing() or cpp_library().name
    found["times are kept in"] = str(store.folder())
    found["fst is imported from"] = str(Path(__file__).resolve().parents[1])
    print(f"{table(('what', 'value'), found.items())}\n\n{describe()}")
    return 0
